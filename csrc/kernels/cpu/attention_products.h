#pragma once

// The two products of attention, q k and p v, on register tiles of rows x vectors.
//
// Both read their right-hand side in words of 32 bits, each a float32 or a pair of two-byte
// elements, one word to a lane (kv_layout.h), and their left-hand side in cells of 32 bits, one
// broadcast to all lanes. Where the processor has the dot product of pairs a cell is a pair too;
// elsewhere it is a float, and a word's two elements are widened and multiplied one behind the
// other. A lane adds its products in ascending order, whatever the size of the tile.

#include <type_traits>

#include "kernels/cpu/kernels.h"
#include "kernels/cpu/kv_layout.h"
#include "kernels/cpu/vector.h"

namespace airside::cpu::AIRSIDE_ISA {

#if defined(__AVX512BF16__)
template <typename T>
inline constexpr bool kDots = std::is_same_v<T, BFloat16>;
#else
template <typename T>
inline constexpr bool kDots = false;
#endif

// Cells for one word.
template <typename T>
inline constexpr int kParts = kDots<T> ? 1 : kPair<T>;

// Keys whose words lie side by side.
inline constexpr int64_t kGroup = 16;
inline constexpr int64_t kKeyTile = kAttentionKeyTile;
inline constexpr int64_t kGroups = kKeyTile / kGroup;
inline constexpr int64_t kGroupsAhead = 4;  // of the next tile

// Floats from one row of scores to the next: not a power of two, whose rows would share few sets of
// the cache.
inline constexpr int64_t kScoreStride = kKeyTile + 16;

// What fits the registers: sums, the operands of one step and one broadcast.
#if defined(__AVX512F__) || defined(__aarch64__)
inline constexpr int kMaxRows = 12;
template <int kRows>
inline constexpr int kMaxVectors = kRows > 6 ? 2 : 4;
#else
inline constexpr int kMaxRows = 6;
template <int kRows>
inline constexpr int kMaxVectors = 2;
#endif

// The keys or values of one tile of keys.
struct Words32 {
  const uint32_t* groups[kGroups + kGroupsAhead];  // of kGroup keys each; all may be read
  int64_t stride;                                  // words from one step to the next
};

inline Words load_words(const uint32_t* p) {
  Words words;
  __builtin_memcpy(&words, p, sizeof words);
  return words;
}

inline Words splat_cell(const float* p) {
  uint32_t bits;
  __builtin_memcpy(&bits, p, sizeof bits);
  return Words{} + bits;
}

template <typename T, int kPart>
Words part_of(Words words) {
  if constexpr (kParts<T> == 1) {
    return words;
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    return kPart == 0 ? words << 16 : words & 0xffff0000;
  } else {
    const Words half = kPart == 0 ? words & 0xffff : words >> 16;
    return words_of(widen(__builtin_convertvector(half, Halves), T{}));
  }
}

template <typename T>
Floats multiply_add(Words cell, Words part, Floats sum) {
#if defined(__AVX512BF16__)
  if constexpr (kDots<T>) {
    return _mm512_dpbf16_ps(sum, __builtin_bit_cast(__m512bh, cell),
                            __builtin_bit_cast(__m512bh, part));
  }
#endif
  return fma(floats_of(cell), floats_of(part), sum);
}

// sums[r][j] += the products of one step: row r's cells, and vector j's words.
template <typename T, int kPart, int kRows, int kVectors>
[[gnu::always_inline]] inline void multiply_part(const float* cells, int64_t cell_stride,
                                                 const Words (&words)[kVectors],
                                                 Floats (&sums)[kRows][kVectors]) {
  Words parts[kVectors];
#pragma GCC unroll 4
  for (int j = 0; j < kVectors; ++j) parts[j] = part_of<T, kPart>(words[j]);
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
    const Words cell = splat_cell(cells + r * cell_stride + kPart);
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) sums[r][j] = multiply_add<T>(cell, parts[j], sums[r][j]);
  }
}

template <typename T, int kRows, int kVectors>
[[gnu::always_inline]] inline void multiply_step(const float* cells, int64_t cell_stride,
                                                 const Words (&words)[kVectors],
                                                 Floats (&sums)[kRows][kVectors]) {
  multiply_part<T, 0>(cells, cell_stride, words, sums);
  if constexpr (kParts<T> == 2) multiply_part<T, 1>(cells, cell_stride, words, sums);
}

// scores[r, t] = scale * queries[r] . keys[t] for kRows rows and the keys [begin, end) of the tile
// at least; queries in rows of steps * kParts cells. Few rows wait for memory: meanwhile the values
// of these keys are fetched, and the next keys, into the second-level cache, which waits for more
// lines at once than the first.
template <typename T, int kRows>
void score(const float* queries, const Words32& keys, const Words32& values, int64_t steps,
           int64_t begin, int64_t end, float scale, float* scores) {
  constexpr int kVectors = kMaxVectors<kRows>;
  constexpr int64_t kStride = kVectors * kLanes;
  constexpr bool kFetches = kRows <= 6;
  static_assert(kKeyTile % kStride == 0 && kStride / kGroup <= kGroupsAhead);
  for (int64_t t = begin / kStride * kStride; t < end; t += kStride) {
    const uint32_t* key[kVectors];
    const uint32_t* next_key[kVectors];
    const uint32_t* value[kVectors];
    for (int j = 0; j < kVectors; ++j) {
      const int64_t at = t + j * kLanes;
      key[j] = keys.groups[at / kGroup] + at % kGroup;
      next_key[j] = keys.groups[(at + kStride) / kGroup];
      value[j] = values.groups[at / kGroup];
    }
    Floats sums[kRows][kVectors] = {};
    for (int64_t step = 0; step < steps; ++step) {
      Words words[kVectors];
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) words[j] = load_words(key[j] + step * keys.stride);
#pragma GCC unroll 4
      for (int j = 0; kFetches && j < kVectors; ++j) {
        __builtin_prefetch(next_key[j] + step * keys.stride, 0, 2);
        __builtin_prefetch(value[j] + step * kGroup, 0, 2);
      }
      multiply_step<T>(queries + step * kParts<T>, steps * kParts<T>, words, sums);
    }
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) {
        store(scores + r * kScoreStride + t + j * kLanes, sums[r][j] * splat(scale));
      }
    }
  }
}

// sums[r] += weights[r] . values over the steps [begin, end) of kPair keys each, in that order, in
// kVectors vectors of the columns from `column` on.
template <typename T, int kRows, int kVectors>
void add_columns(const float* weights, const Words32& values, int64_t column, int64_t begin,
                 int64_t end, float* sums, int64_t width) {
  constexpr int64_t kGroupSteps = kGroup / kPair<T>;
  Floats sum[kRows][kVectors];
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) sum[r][j] = load(sums + r * width + column + j * kLanes);
  }
  for (int64_t step = begin; step < end;) {
    const int64_t group = step / kGroupSteps;
    const int64_t stop = min(end, (group + 1) * kGroupSteps);
    const uint32_t* value = values.groups[group] + step % kGroupSteps * values.stride + column;
    for (; step < stop; ++step, value += values.stride) {
      Words words[kVectors];
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) words[j] = load_words(value + j * kLanes);
      multiply_step<T>(weights + step * kParts<T>, kScoreStride, words, sum);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) store(sums + r * width + column + j * kLanes, sum[r][j]);
  }
}

template <typename T, int kRows>
void add_values(const float* weights, const Words32& values, int64_t begin, int64_t end,
                float* sums, int64_t width) {
  if (begin >= end) return;
  constexpr int kVectors = kMaxVectors<kRows>;
  int64_t column = 0;
  for (; column + kVectors * kLanes <= width; column += kVectors * kLanes) {
    add_columns<T, kRows, kVectors>(weights, values, column, begin, end, sums, width);
  }
  for (; column < width; column += kLanes) {
    add_columns<T, kRows, 1>(weights, values, column, begin, end, sums, width);
  }
}

// The same for one row, which sees the keys [seen_begin, seen_end) of the tile: what the steps hold
// of others counts as 0 and not as what is there, which may be no number.
template <typename T>
void add_seen_values(const float* weights, const Words32& values, int64_t begin, int64_t end,
                     int64_t seen_begin, int64_t seen_end, float* sums, int64_t width) {
  constexpr int64_t kGroupSteps = kGroup / kPair<T>;
  for (int64_t step = begin; step < end; ++step) {
    const int64_t key = step * kPair<T>;
    uint32_t mask = 0xffffffff;
    if (kPair<T> == 2 && key < seen_begin) mask &= 0xffff0000;
    if (kPair<T> == 2 && key + 1 >= seen_end) mask &= 0x0000ffff;
    const uint32_t* value = values.groups[step / kGroupSteps] + step % kGroupSteps * values.stride;
    for (int64_t column = 0; column < width; column += kLanes) {
      const Words words[1] = {load_words(value + column) & mask};
      Floats sum[1][1] = {{load(sums + column)}};
      multiply_step<T>(weights + step * kParts<T>, kScoreStride, words, sum);
      store(sums + column, sum[0][0]);
    }
  }
}

}  // namespace airside::cpu::AIRSIDE_ISA
