#pragma once

#include <cstddef>

namespace airside {

inline constexpr std::size_t kCacheLineBytes = 64;

// Asks for all cache lines of [begin, begin + size) at once. Between two steps a model's weights go
// through the caches, so that everything a step looks at comes from memory; waiting for one line
// after the other would be most of a step's time.
inline void Prefetch(const void* begin, std::size_t size) {
  const char* const at = static_cast<const char*>(begin);
  for (std::size_t offset = 0; offset < size; offset += kCacheLineBytes) {
    __builtin_prefetch(at + offset);
  }
}

template <typename Vector>
void PrefetchBack(const Vector& vector) {
  if (!vector.empty()) __builtin_prefetch(&vector.back());
}

}  // namespace airside
