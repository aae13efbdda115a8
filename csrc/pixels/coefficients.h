#pragma once

#include <cstdint>
#include <vector>

#include "pixels/pixels.h"

namespace airside::pixels {

inline constexpr int kFractionBits = 22;  // two bits above eight are room for overshoot

// What one direction of a resize weighs: for each output position, a run of input positions.
struct Coefficients {
  struct Run {
    int64_t first;  // input position
    int64_t count;
  };
  std::vector<Run> runs;         // one per output position
  std::vector<int32_t> weights;  // runs.size() rows of `stride`
  int64_t stride;

  const int32_t* of(int64_t position) const { return weights.data() + position * stride; }
};

Coefficients coefficients(Filter filter, int64_t in_size, int64_t out_size);

}  // namespace airside::pixels
