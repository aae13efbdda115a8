// The passes of `sample` that touch every logit of a row.

#include "kernels/cpu/isa.h"
#include "kernels/cpu/vector.h"

namespace airside::cpu::AIRSIDE_ISA {

float largest(const float* values, int64_t n) {
  constexpr int64_t kStep = 4 * kLanes;
  const Floats none = splat(-kInfinity);
  Floats tops[4] = {none, none, none, none};
  int64_t i = 0;
  for (; i + kStep <= n; i += kStep) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) tops[j] = larger(load(values + i + j * kLanes), tops[j]);
  }
  float top = largest_of(larger(larger(tops[0], tops[1]), larger(tops[2], tops[3])));
  for (; i < n; ++i) top = values[i] > top ? values[i] : top;
  return top;
}

void weigh(const float* logits, int64_t n, float top, float temperature, float* weights) {
  for (int64_t i = 0; i < n; i += kLanes) {
    const Floats logit = load_first(logits + i, n - i);
    const Floats weight = exp((logit - splat(top)) / splat(temperature));
    store_first(weights + i, logit > splat(-kInfinity) ? weight : Floats{}, n - i);
  }
}

void sum_chunks(const float* weights, int64_t n, float* sums) {
  for (int64_t begin = 0; begin < n; begin += kWeightChunk) {
    const int64_t end = min(n, begin + kWeightChunk);
    Floats sum = {};
    for (int64_t i = begin; i < end; i += kLanes) sum += load_first(weights + i, end - i);
    sums[begin / kWeightChunk] = sum_of(sum);
  }
}

}  // namespace airside::cpu::AIRSIDE_ISA
