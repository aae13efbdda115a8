#pragma once

#include <stdexcept>

namespace airside {

// For what only a mistake in this folder can break. Stays on in release builds: a core that goes on
// with a broken table gives a user somebody else's tokens.
inline void Ensure(bool holds, const char* what) {
  if (!holds) [[unlikely]] {
    throw std::logic_error(what);
  }
}

}  // namespace airside
