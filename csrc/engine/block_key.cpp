#include "engine/block_key.h"

namespace airside {
namespace {

constexpr std::uint64_t kSeedHi = 0x243F6A8885A308D3ULL;
constexpr std::uint64_t kSeedLo = 0x13198A2E03707344ULL;

// One step of a stream: for each value a permutation of the states, and for each state one of the
// values, so that nothing is lost on the way. The two streams differ in their multipliers.
template <std::uint64_t kMultiplier>
std::uint64_t Absorb(std::uint64_t state, std::uint64_t value) {
  state ^= value;
  state ^= state >> 32;
  state *= kMultiplier;
  state ^= state >> 29;
  state *= 0x9E3779B97F4A7C15ULL;
  return state ^ (state >> 32);
}

BlockKey Absorb(BlockKey key, std::uint64_t value) {
  return {Absorb<0xBF58476D1CE4E5B9ULL>(key.hi, value),
          Absorb<0xD6E8FEB86659FD93ULL>(key.lo, value + kSeedLo)};
}

}  // namespace

BlockKey RootKey(std::string_view salt) {
  BlockKey key{kSeedHi, kSeedLo};
  for (const char character : salt) key = Absorb(key, static_cast<unsigned char>(character));
  return Absorb(key, salt.size());
}

BlockKey NextKey(BlockKey before, std::span<const std::uint64_t> contents) {
  BlockKey key = before;
  for (const std::uint64_t content : contents) key = Absorb(key, content);
  return key;
}

}  // namespace airside
