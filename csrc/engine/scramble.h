#pragma once

#include <cstdint>

namespace airside {

// A permutation of the 64-bit numbers that looks like none: the step and the finalizer of
// SplitMix64 (Steele et al. 2014).
constexpr std::uint64_t Scramble(std::uint64_t value) {
  value += 0x9E3779B97F4A7C15ULL;
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9ULL;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBULL;
  return value ^ (value >> 31);
}

}  // namespace airside
