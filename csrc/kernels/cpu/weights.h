#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/cpu/kernels.h"

namespace airside::cpu {

// The sum of weights, in one order; leaves those of its chunks in `chunk_sums`.
inline double sum(std::span<const float> weights, std::vector<float>& chunk_sums) {
  chunk_sums.resize((weights.size() + kWeightChunk - 1) / kWeightChunk);
  kernels().sum_chunks(weights.data(), static_cast<int64_t>(weights.size()), chunk_sums.data());
  double total = 0.0;
  for (const float chunk : chunk_sums) total += chunk;
  return total;
}

}  // namespace airside::cpu
