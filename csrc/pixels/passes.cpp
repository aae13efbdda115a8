// The two passes of a resize, in vectors of this file's instruction set. No function of the
// standard library is called: the linker keeps one copy of such a function, and it could be the
// one that this processor cannot run.

#include "pixels/isa.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define AIRSIDE_STRING_OF(name) #name
#define AIRSIDE_STRING(name) AIRSIDE_STRING_OF(name)

namespace airside::pixels::AIRSIDE_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef int32_t Sums __attribute__((vector_size(kLanes * 4)));
typedef uint8_t Bytes __attribute__((vector_size(kLanes)));
typedef uint8_t Square __attribute__((vector_size(16)));  // one row of 16 x 16 bytes

constexpr int kSquare = 16;
constexpr int kVectors = 6;  // as many sums as every set has registers for
static_assert(kBlock % (kVectors * kLanes) == 0 && kBand % kSquare == 0);

template <typename Vector>
Vector load(const uint8_t* from) {
  Vector loaded;
  __builtin_memcpy(&loaded, from, sizeof loaded);
  return loaded;
}

template <typename Vector>
void store(uint8_t* to, const Vector& stored) {
  __builtin_memcpy(to, &stored, sizeof stored);
}

Square first_halves(Square a, Square b) {
  return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
}
Square second_halves(Square a, Square b) {
  return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15,
                                 31);
}

// GCC 12 takes a conversion between bytes and words apart into single bytes: hence the intrinsics.
Sums widened(const uint8_t* from) {
#if defined(__AVX512F__)
  return Sums(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif defined(__AVX2__)
  return Sums(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#elif defined(__x86_64__)
  int32_t bytes;
  __builtin_memcpy(&bytes, from, sizeof bytes);
  const Square first = Square(_mm_cvtsi32_si128(bytes));
  return Sums(first_halves(first_halves(first, Square{}), Square{}));
#else
  return __builtin_convertvector(load<Bytes>(from), Sums);
#endif
}

Bytes rounded(Sums sums) {
  const Sums whole = sums >> kFractionBits;
#if defined(__AVX512F__)
  return Bytes(_mm512_cvtusepi32_epi8(__m512i(whole < 0 ? Sums{} : whole)));
#elif defined(__AVX2__)
  const __m256i wide = __m256i(whole);
  const __m128i halves =
      _mm_packus_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
  return __builtin_bit_cast(Bytes, _mm_cvtsi128_si64(_mm_packus_epi16(halves, halves)));
#else
  const Sums above = whole < 0 ? Sums{} : whole;
  return __builtin_convertvector(above > 255 ? Sums{} + 255 : above, Bytes);
#endif
}

// out[i] = the sum over k of weights[k] * in[k * row_bytes + i], as a byte, for kBlock of i.
void weigh(const uint8_t* in, int64_t row_bytes, const int32_t* weights, int64_t count,
           uint8_t* out) {
  for (int64_t at = 0; at < kBlock; at += kVectors * kLanes) {
    Sums sums[kVectors];
#pragma GCC unroll 6
    for (Sums& sum : sums) sum = Sums{} + (1 << (kFractionBits - 1));
    const uint8_t* row = in + at;
    for (int64_t k = 0; k < count; ++k, row += row_bytes) {
      const Sums weight = Sums{} + weights[k];
#pragma GCC unroll 6
      for (int v = 0; v < kVectors; ++v) sums[v] += weight * widened(row + v * kLanes);
    }
#pragma GCC unroll 6
    for (int v = 0; v < kVectors; ++v) store(out + at + v * kLanes, rounded(sums[v]));
  }
}

// Rows become columns: a perfect shuffle of all 256 bytes, four times.
void transpose(Square (&rows)[kSquare]) {
#pragma GCC unroll 4
  for (int round = 0; round < 4; ++round) {
    Square shuffled[kSquare];
#pragma GCC unroll 8
    for (int i = 0; i < kSquare / 2; ++i) {
      shuffled[2 * i] = first_halves(rows[i], rows[i + kSquare / 2]);
      shuffled[2 * i + 1] = second_halves(rows[i], rows[i + kSquare / 2]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kSquare; ++i) rows[i] = shuffled[i];
  }
}

// The band's place of the bytes of one column: [width][colour][kBand], or none for what is no
// colour.
template <int kChannels>
uint8_t* column(uint8_t* turned, int64_t byte) {
  if constexpr (kChannels == kColours) return turned + byte * kBand;
  if (byte % kChannels == kColours) return nullptr;
  return turned + (byte / kChannels * kColours + byte % kChannels) * kBand;
}

// [kBand rows][width][kChannels] to [width][colour][kBand]; the last row stands for those behind
// it.
template <int kChannels>
void turn_in(const View& in, int64_t first_row, uint8_t* turned) {
  const int64_t num_bytes = in.width * kChannels;
  for (int64_t group = 0; group < kBand; group += kSquare) {
    const uint8_t* rows[kSquare];
    for (int i = 0; i < kSquare; ++i) {
      const int64_t row = first_row + group + i;
      rows[i] = in.data + (row < in.height ? row : in.height - 1) * in.row_bytes;
    }
    int64_t byte = 0;
    for (; byte + kSquare <= num_bytes; byte += kSquare) {
      Square square[kSquare];
#pragma GCC unroll 16
      for (int i = 0; i < kSquare; ++i) square[i] = load<Square>(rows[i] + byte);
      transpose(square);
#pragma GCC unroll 16
      for (int i = 0; i < kSquare; ++i) {
        uint8_t* to = column<kChannels>(turned, byte + i);
        if (to != nullptr) store(to + group, square[i]);
      }
    }
    for (; byte < num_bytes; ++byte) {
      uint8_t* to = column<kChannels>(turned, byte);
      for (int i = 0; to != nullptr && i < kSquare; ++i) to[group + i] = rows[i][byte];
    }
  }
}

// [width][colour][kBand] to num_rows rows of [width][colour], with up to 15 bytes more than that.
void turn_out(const uint8_t* turned, int64_t num_bytes, int64_t num_rows, uint8_t* out,
              int64_t row_bytes) {
  for (int64_t group = 0; group < num_rows; group += kSquare) {
    const int64_t left = num_rows - group;
    for (int64_t byte = 0; byte < num_bytes; byte += kSquare) {
      Square square[kSquare];
#pragma GCC unroll 16
      for (int i = 0; i < kSquare; ++i)
        square[i] = load<Square>(turned + (byte + i) * kBand + group);
      transpose(square);
#pragma GCC unroll 16
      for (int i = 0; i < kSquare; ++i) {
        if (i < left) store(out + (group + i) * row_bytes + byte, square[i]);
      }
    }
  }
}

void along_rows(const View& in, int64_t first_row, const Coefficients& along, uint8_t* turned,
                uint8_t* out, int64_t out_row_bytes) {
  if (in.channels == kColours)
    turn_in<kColours>(in, first_row, turned);
  else
    turn_in<kColours + 1>(in, first_row, turned);
  const int64_t width = static_cast<int64_t>(along.runs.end() - along.runs.begin());
  uint8_t* resized = turned + round_up(in.width, kSquare) * kBlock;
  for (int64_t x = 0; x < width; ++x) {
    const Coefficients::Run run = along.runs.begin()[x];
    weigh(turned + run.first * kBlock, kBlock, along.of(x), run.count, resized + x * kBlock);
  }
  const int64_t rows_left = in.height - first_row;
  turn_out(resized, width * kColours, rows_left < kBand ? rows_left : kBand, out, out_row_bytes);
}

void along_columns(const uint8_t* in, int64_t row_bytes, const int32_t* weights, int64_t count,
                   uint8_t* out, int64_t num_bytes) {
  int64_t at = 0;
  for (; at + kBlock <= num_bytes; at += kBlock) {
    weigh(in + at, row_bytes, weights, count, out + at);
  }
  if (at == num_bytes) return;
  if (num_bytes >= kBlock) {  // the last block overlaps the one before it
    weigh(in + num_bytes - kBlock, row_bytes, weights, count, out + num_bytes - kBlock);
    return;
  }
  for (; at < num_bytes; ++at) {
    int32_t sum = 1 << (kFractionBits - 1);
    for (int64_t k = 0; k < count; ++k) sum += weights[k] * in[k * row_bytes + at];
    const int32_t whole = sum >> kFractionBits;
    out[at] = static_cast<uint8_t>(whole < 0 ? 0 : whole > 255 ? 255 : whole);
  }
}

}  // namespace

extern const Passes kPasses;
const Passes kPasses = {
    .isa = AIRSIDE_STRING(AIRSIDE_ISA), .along_rows = along_rows, .along_columns = along_columns};

}  // namespace airside::pixels::AIRSIDE_ISA
