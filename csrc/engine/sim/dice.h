#pragma once

#include <cstdint>
#include <random>

namespace airside::sim {

// Everything random in a simulation, from one seed. Not the standard library's distributions: a
// seed must mean the same with every one.
class Dice {
 public:
  explicit Dice(std::uint64_t seed) : random_(seed) {}

  // Both included.
  int Draw(int low, int high) {
    return low + static_cast<int>(random_() % static_cast<std::uint64_t>(high - low + 1));
  }
  bool Chance(int percent) { return Draw(1, 100) <= percent; }

 private:
  std::mt19937_64 random_;
};

}  // namespace airside::sim
