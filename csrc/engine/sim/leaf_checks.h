#pragma once

#include <cstdint>

namespace airside::sim {

// Compares classes that do one thing with the plainest way to do it, on random input. Throws
// std::logic_error where they differ.
void CheckLeaves(std::uint64_t seed);

}  // namespace airside::sim
