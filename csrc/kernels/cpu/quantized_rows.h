#pragma once

#include "kernels/cpu/isa.h"
#include "kernels/cpu/packed_weight.h"
#include "kernels/cpu/vector.h"

// Activations as the integer products read them: signed 8-bit values, each group of inputs with a
// scale of its own. Weights are unsigned bytes with a zero point z, so of a group
//
//   sum((w - z) * x) = sum(w * x) - z * sum(x)
//
// and the second sum is the same for every output feature. All of it is exact in 32-bit integers.
namespace airside::cpu::AIRSIDE_ISA {

inline constexpr int64_t kQuad = 4;  // inputs that one 32-bit lane of a weight holds

#if defined(__AVX512VNNI__)
inline constexpr int64_t kQuadBytes = 4;  // four int8, as vpdpbusd takes them
#else
inline constexpr int64_t kQuadBytes =
    8;  // four int16 in the order 0, 2, 1, 3: two pairs for pmaddwd
#endif

// One quantised row: values, then a scale and a sum of values per group.
struct QuantizedRowLayout {
  int64_t group;  // inputs
  int64_t num_groups;
  int64_t values_bytes;

  QuantizedRowLayout(WeightFormat format, int64_t in_features)
      : group(format == WeightFormat::kInt8 ? in_features : kGgufBlock),
        num_groups(format == WeightFormat::kInt8 ? 1 : in_features / kGgufBlock),
        values_bytes(round_up(in_features, kGgufBlock) / kQuad * kQuadBytes) {}

  int64_t bytes() const { return round_up(values_bytes + num_groups * 8, 64); }
  const float* scales(const uint8_t* row) const {
    return reinterpret_cast<const float*>(row + values_bytes);
  }
  const int32_t* sums(const uint8_t* row) const {
    return reinterpret_cast<const int32_t*>(row + values_bytes + num_groups * 4);
  }
};

typedef int16_t Pairs __attribute__((vector_size(kLanes * 4)));

inline Ints splat_int(int32_t x) { return x - Ints{}; }

inline Ints load_ints(const void* p) {
  Ints x;
  __builtin_memcpy(&x, p, sizeof x);
  return x;
}

inline void store_ints(int32_t* p, Ints x) { __builtin_memcpy(p, &x, sizeof x); }

inline int32_t load_int(const void* p) {
  int32_t x;
  __builtin_memcpy(&x, p, sizeof x);
  return x;
}

#if !defined(__AVX512VNNI__)
// Sums of the products of neighbours.
inline Ints multiply_pairs(Pairs a, Pairs b) {
#if defined(__AVX512BW__)
  return __builtin_bit_cast(
      Ints, _mm512_madd_epi16(__builtin_bit_cast(__m512i, a), __builtin_bit_cast(__m512i, b)));
#elif defined(__AVX2__)
  return __builtin_bit_cast(
      Ints, _mm256_madd_epi16(__builtin_bit_cast(__m256i, a), __builtin_bit_cast(__m256i, b)));
#elif defined(__SSE2__)
  return __builtin_bit_cast(
      Ints, _mm_madd_epi16(__builtin_bit_cast(__m128i, a), __builtin_bit_cast(__m128i, b)));
#else
  const Ints x = __builtin_bit_cast(Ints, a);
  const Ints y = __builtin_bit_cast(Ints, b);
  return (x >> 16) * (y >> 16) + ((x << 16) >> 16) * ((y << 16) >> 16);
#endif
}
#endif

// Four inputs of kLanes features: [kLanes][4] unsigned bytes.
struct WeightQuad {
#if defined(__AVX512VNNI__)
  Ints bytes;
  explicit WeightQuad(Ints x) : bytes(x) {}
#else
  Pairs even;
  Pairs odd;
  explicit WeightQuad(Ints x)
      : even(__builtin_bit_cast(Pairs, x & 0x00ff00ff)),
        odd(__builtin_bit_cast(Pairs, __builtin_bit_cast(Words, x) >> 8 & 0x00ff00ffu)) {}
#endif
};

// The same four inputs of one row, for every lane.
struct RowQuad {
#if defined(__AVX512VNNI__)
  Ints bytes;
  explicit RowQuad(const uint8_t* p) : bytes(splat_int(load_int(p))) {}
#else
  Pairs even;
  Pairs odd;
  explicit RowQuad(const uint8_t* p)
      : even(__builtin_bit_cast(Pairs, splat_int(load_int(p)))),
        odd(__builtin_bit_cast(Pairs, splat_int(load_int(p + 4)))) {}
#endif
};

// sum + the four products of each lane.
inline Ints multiply_quads(Ints sum, const WeightQuad& w, const RowQuad& x) {
#if defined(__AVX512VNNI__)
  return __builtin_bit_cast(Ints, _mm512_dpbusd_epi32(__builtin_bit_cast(__m512i, sum),
                                                      __builtin_bit_cast(__m512i, w.bytes),
                                                      __builtin_bit_cast(__m512i, x.bytes)));
#else
  return sum + multiply_pairs(w.even, x.even) + multiply_pairs(w.odd, x.odd);
#endif
}

}  // namespace airside::cpu::AIRSIDE_ISA
