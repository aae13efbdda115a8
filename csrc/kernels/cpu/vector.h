#pragma once

// One register of floats at the width of the instruction set this file is compiled for, in the
// vector extension that GCC and Clang share. Everything is in the namespace AIRSIDE_ISA: the linker
// must never merge two widths.

#include <cstdint>
#include <utility>

#include "kernels/cpu/types.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace airside::cpu::AIRSIDE_ISA {

#if defined(__AVX512F__)
inline constexpr int kLanes = 16;
#elif defined(__AVX2__)
inline constexpr int kLanes = 8;
#else
inline constexpr int kLanes = 4;
#endif

typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));
typedef uint16_t Halves __attribute__((vector_size(kLanes * 2)));

inline constexpr float kInfinity = __builtin_inff();

inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t round_up(int64_t n, int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

inline Floats splat(float x) { return x - Floats{}; }
inline Words words_of(Floats x) { return __builtin_bit_cast(Words, x); }
inline Floats floats_of(Words x) { return __builtin_bit_cast(Floats, x); }

// a * b + c, rounded once where the processor can. Contraction is off elsewhere (CMakeLists.txt),
// so that the order and the roundings of every sum are those written here, whichever loop it is in.
inline Floats fma(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
  return vfmaq_f32(c, a, b);
#else
  return a * b + c;
#endif
}

// b where either is NaN.
inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }

// ---- widening and rounding

inline Floats widen(Halves h, BFloat16) {
  return floats_of(__builtin_convertvector(h, Words) << 16);
}

// The upper halves of these words are x as bfloat16: to nearest, ties to even.
inline Words round_words(Floats x) {
  const Words bits = words_of(x);
  return x == x ? bits + 0x7fff + ((bits >> 16) & 1) : Words{} + 0x7fc00000;
}

#if defined(__AVX512BF16__)
// One instruction, to which subnormal numbers are 0.
inline Halves narrow(Floats x, BFloat16) {
  return __builtin_bit_cast(Halves, _mm512_cvtneps_pbh(x));
}
#else
inline Halves narrow(Floats x, BFloat16) {
  return __builtin_convertvector(round_words(x) >> 16, Halves);
}
#endif

// x as it would be after a store and a load.
inline Floats round_to(Floats x, float) { return x; }
inline Floats round_to(Floats x, BFloat16) { return widen(narrow(x, BFloat16{}), BFloat16{}); }

#if defined(__AVX512F__)
inline Floats widen(Halves h, Float16) { return _mm512_cvtph_ps(__builtin_bit_cast(__m256i, h)); }
inline Halves narrow(Floats x, Float16) {
  return __builtin_bit_cast(Halves,
                            _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
#elif defined(__F16C__)
inline Floats widen(Halves h, Float16) { return _mm256_cvtph_ps(__builtin_bit_cast(__m128i, h)); }
inline Halves narrow(Floats x, Float16) {
  return __builtin_bit_cast(Halves,
                            _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
#else
inline Floats widen(Halves h, Float16) {
  const Words wide = __builtin_convertvector(h, Words);
  const Words magnitude = (wide & 0x7fff) << 13;
  const Words sign = (wide & 0x8000) << 16;
  // Moves the bias of the exponent, and makes subnormals normal.
  const Words finite = words_of(floats_of(magnitude) * splat(0x1p112f));
  return floats_of(sign | (magnitude < 0x7c00u << 13 ? finite : magnitude | 0x7f800000u));
}

inline Halves narrow(Floats x, Float16) {
  const Words sign = (words_of(x) >> 16) & 0x8000;
  const Words magnitude = words_of(x) & 0x7fffffff;
  // Next to 0.5 a float is a multiple of 2^-24, the spacing of the subnormal halves: the addition
  // rounds.
  const Words subnormal = words_of(floats_of(magnitude) + splat(0.5f)) - 0x3f000000u;
  const Words normal = (magnitude - (112u << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  const Words finite = magnitude < 0x38800000u ? subnormal : normal;
  const Words special = magnitude > 0x7f800000u ? Words{} + 0x7e00 : Words{} + 0x7c00;
  return __builtin_convertvector(sign | (magnitude < 0x47800000u ? finite : special), Halves);
}
#endif

inline Floats round_to(Floats x, Float16) { return widen(narrow(x, Float16{}), Float16{}); }

// ---- loads and stores, widening and rounding as the element type asks

inline Floats load(const float* p) {
  Floats x;
  __builtin_memcpy(&x, p, sizeof x);
  return x;
}

template <typename T>
Floats load(const T* p) {
  Halves h;
  __builtin_memcpy(&h, p, sizeof h);
  return widen(h, T{});
}

inline void store(float* p, Floats x) { __builtin_memcpy(p, &x, sizeof x); }

template <typename T>
void store(T* p, Floats x) {
  const Halves h = narrow(x, T{});
  __builtin_memcpy(p, &h, sizeof h);
}

// The first n lanes, 0 < n <= kLanes; the others are 0.
template <typename T>
Floats load_first(const T* p, int64_t n) {
  if (n >= kLanes) return load(p);
  T padded[kLanes] = {};
  for (int64_t i = 0; i < n; ++i) padded[i] = p[i];
  return load(padded);
}

template <typename T>
void store_first(T* p, Floats x, int64_t n) {
  if (n >= kLanes) return store(p, x);
  T padded[kLanes];
  store(padded, x);
  for (int64_t i = 0; i < n; ++i) p[i] = padded[i];
}

template <typename T>
Floats rounded(Floats x) {
  return round_to(x, T{});
}

// ---- across lanes

template <int kDistance, int... kLane>
Floats swap_lanes(Floats x, std::integer_sequence<int, kLane...>) {
  return __builtin_shufflevector(x, x, (kLane ^ kDistance)...);
}

template <int kDistance = kLanes / 2>
float sum_of(Floats x) {
  x += swap_lanes<kDistance>(x, std::make_integer_sequence<int, kLanes>{});
  if constexpr (kDistance > 1) {
    return sum_of<kDistance / 2>(x);
  } else {
    return x[0];
  }
}

template <int kDistance = kLanes / 2>
float largest_of(Floats x) {
  x = larger(x, swap_lanes<kDistance>(x, std::make_integer_sequence<int, kLanes>{}));
  if constexpr (kDistance > 1) {
    return largest_of<kDistance / 2>(x);
  } else {
    return x[0];
  }
}

template <int kDistance, int... kLane>
void exchange_quarters(Floats& upper, Floats& lower, std::integer_sequence<int, kLane...>) {
  const Floats a = upper;
  const Floats b = lower;
  upper =
      __builtin_shufflevector(a, b, ((kLane & kDistance) ? kLanes + kLane - kDistance : kLane)...);
  lower =
      __builtin_shufflevector(a, b, ((kLane & kDistance) ? kLanes + kLane : kLane + kDistance)...);
}

// Transposes a square of kLanes x kLanes in place: swaps the off-diagonal quarters, then does so in
// each quarter. Inlined, it stays in registers.
template <int kDistance = kLanes / 2>
[[gnu::always_inline]] inline void transpose(Floats (&rows)[kLanes]) {
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    if ((i & kDistance) == 0) {
      exchange_quarters<kDistance>(rows[i], rows[i + kDistance],
                                   std::make_integer_sequence<int, kLanes>{});
    }
  }
  if constexpr (kDistance > 1) transpose<kDistance / 2>(rows);
}

// ---- exp

// e^r for |r| <= ln(2) / 2. The polynomial is that of Cephes' expf.
inline Floats exp_of_remainder(Floats r) {
  Floats p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  return fma(p, r * r, r) + splat(1.0f);
}

// Within 2 units in the last place where that is a normal number; 0 below -104, inf above 89, NaN
// for NaN.
#if defined(__AVX512F__)
inline Floats exp(Floats x) {
  // Of two operands the second is the result where one is NaN.
  const Floats clamped = _mm512_max_ps(splat(-104.0f), _mm512_min_ps(splat(89.0f), x));
  const Floats n = _mm512_roundscale_ps(clamped * splat(1.44269504f),
                                        _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  Floats r = fma(n, splat(-0.693359375f), clamped);
  r = fma(n, splat(2.12194440e-4f), r);
  return _mm512_scalef_ps(exp_of_remainder(r), n);
}
#else
inline Floats exp(Floats x) {
  const Floats lowest = splat(-87.3f);  // below it the power is no normal number: 0
  const Floats highest = splat(88.3f);
  const Floats clamped = x < lowest ? lowest : (x > highest ? highest : x);
  const Floats magic = splat(0x1.8p23f);  // adding it leaves round(x) in the low bits
  const Floats shifted = fma(clamped, splat(1.44269504f), magic);
  const Floats n = shifted - magic;
  Floats r = fma(n, splat(-0.693359375f), clamped);
  r = fma(n, splat(2.12194440e-4f), r);
  const Floats power = floats_of((words_of(shifted) << 23) + 0x3f800000u);
  const Floats y = exp_of_remainder(r) * power;
  return x < lowest ? Floats{} : (x > highest ? splat(kInfinity) : y);
}
#endif

// ---- element types

// Calls body with a null pointer of the element type: `visit(dtype, [&]<typename T>(T*) { ... })`.
template <typename Body>
void visit(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kFloat32:
      return body(static_cast<float*>(nullptr));
    case DType::kBFloat16:
      return body(static_cast<BFloat16*>(nullptr));
    case DType::kFloat16:
      return body(static_cast<Float16*>(nullptr));
  }
}

}  // namespace airside::cpu::AIRSIDE_ISA
