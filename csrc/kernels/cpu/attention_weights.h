#pragma once

// The softmax of attention, a register at a time: from scores to the weights that the second
// product takes.

#include "kernels/cpu/attention_products.h"

namespace airside::cpu::AIRSIDE_ISA {

// Scores are in units in which weight_of is the exponential: bits where pairs are multiplied, since
// the weight will be rounded to bfloat16 anyway, else nats.
template <typename T>
float score_scale(const PagedAttention& args) {
  return kDots<T> ? args.scale * 1.44269504f : args.scale;
}

// The weight of a score that is so far above the largest one, which is to say 0 or less, or NaN.
template <typename T>
Floats weight_of(Floats x) {
#if defined(__AVX512BF16__)
  if constexpr (kDots<T>) {  // 2^x within 1.1e-4 of itself, a nineteenth of half a unit of the
                             // weight's last place; 1 at 0, and without a jump at whole numbers
    const Floats r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    Floats p = splat(0.07826747f);
    p = fma(p, r, splat(0.22630836f));
    p = fma(p, r, splat(0.69542417f));
    p = fma(p, r, splat(1.0f));
    return _mm512_scalef_ps(p, x);
  }
#endif
  return exp(x);
}

// What weights are computed of at a time, from a multiple of it on: the keys of one store of cells.
template <typename T>
inline constexpr int kWeightLanes = kDots<T> ? 2 * kLanes : kLanes;

// Turns kWeightLanes scores into weights, written as cells, and adds what these are to the mass. In
// place: the cells of a pair need less than its scores.
template <typename T>
Floats weigh(float* scores, int64_t t, Floats base, Floats mass) {
  const Floats weights = weight_of<T>(load(scores + t) - base);
#if defined(__AVX512BF16__)
  if constexpr (kDots<T>) {
    const Floats more = weight_of<T>(load(scores + t + kLanes) - base);
    const __m512bh pairs = _mm512_cvtne2ps_pbh(more, weights);
    __builtin_memcpy(scores + t / kPair<T>, &pairs, sizeof pairs);
    const __m512bh ones = __builtin_bit_cast(__m512bh, Words{} + 0x3f803f80);
    return _mm512_dpbf16_ps(mass, pairs, ones);
  }
#endif
  const Floats kept = std::is_same_v<T, BFloat16> ? round_to(weights, BFloat16{}) : weights;
  store(scores + t, kept);
  return mass + kept;
}

}  // namespace airside::cpu::AIRSIDE_ISA
