// Products with GGUF's blocks: 32 inputs with a scale of their own, and activations in blocks
// alike. A block's products are summed in integers. Then one chain in float32 goes over the blocks
// in ascending order, started at 0:
//
//   sum = fma(products, d * a, sum), and for Q4_1 after it sum = fma(m, a * sum(x), sum)
//
// where d and m are the weights' scale and minimum and a is the activations' scale.
#include "kernels/cpu/quantized_rows.h"

namespace airside::cpu::AIRSIDE_ISA {
namespace {

#if defined(__AVX512VNNI__)
constexpr int kMostRows = 6;
#elif defined(__AVX512F__)
constexpr int kMostRows = 4;
#else
constexpr int kMostRows = 2;
#endif
constexpr int kVectors = 2;  // registers of features beside each other
constexpr int kFeatures = kVectors * kLanes;
constexpr int64_t kQuads = kGgufBlock / kQuad;

// ---- a panel's block: values, [quad][kPanel][4] bytes, then d [kPanel] and m [kPanel], halves

struct Q8_0 {
  static constexpr bool kNibbles = false;
  static constexpr bool kHasMinimum = false;
  static constexpr int32_t kZero = 128;
};

struct Q4_0 {
  static constexpr bool kNibbles = true;  // the low ones are quads 0 to 3, the high ones 4 to 7
  static constexpr bool kHasMinimum = false;
  static constexpr int32_t kZero = 8;
};

struct Q4_1 {
  static constexpr bool kNibbles = true;
  static constexpr bool kHasMinimum = true;
  static constexpr int32_t kZero = 0;
};

template <typename Format>
constexpr int64_t kValuesBytes = kPanel * kGgufBlock / (Format::kNibbles ? 2 : 1);

template <typename Format>
constexpr int64_t kBlockBytes = kValuesBytes<Format> + kPanel * (Format::kHasMinimum ? 4 : 2);

// dots += the products of one quad of kRows rows, the first of which is at x.
template <int kRows>
[[gnu::always_inline]] inline void add_quad(Ints (&dots)[kRows][kVectors], Ints w0, Ints w1,
                                            const uint8_t* x, int64_t row_bytes) {
  const WeightQuad q0(w0);
  const WeightQuad q1(w1);
#pragma GCC unroll 6
  for (int row = 0; row < kRows; ++row) {
    const RowQuad quad(x + row * row_bytes);
    dots[row][0] = multiply_quads(dots[row][0], q0, quad);
    dots[row][1] = multiply_quads(dots[row][1], q1, quad);
  }
}

// dots += the products of a block.
template <typename Format, int kRows>
[[gnu::always_inline]] inline void add_block(Ints (&dots)[kRows][kVectors], const uint8_t* w,
                                             const uint8_t* x, int64_t row_bytes) {
  constexpr int64_t kStep = kPanel * kQuad;
  constexpr int64_t kNext = kLanes * kQuad;
  if constexpr (Format::kNibbles) {
    constexpr int64_t kHalf = kQuads / 2;
#pragma GCC unroll 4
    for (int64_t quad = 0; quad < kHalf; ++quad) {
      const Words w0 = __builtin_bit_cast(Words, load_ints(w + quad * kStep));
      const Words w1 = __builtin_bit_cast(Words, load_ints(w + quad * kStep + kNext));
      const auto nibbles = [](Words bytes) {
        return __builtin_bit_cast(Ints, bytes & 0x0f0f0f0fu);
      };
      add_quad(dots, nibbles(w0), nibbles(w1), x + quad * kQuadBytes, row_bytes);
      add_quad(dots, nibbles(w0 >> 4), nibbles(w1 >> 4), x + (quad + kHalf) * kQuadBytes,
               row_bytes);
    }
  } else {
#pragma GCC unroll 8
    for (int64_t quad = 0; quad < kQuads; ++quad) {
      const uint8_t* at = w + quad * kStep;
      add_quad(dots, load_ints(at), load_ints(at + kNext), x + quad * kQuadBytes, row_bytes);
    }
  }
}

// The products of kRows rows with kFeatures features, the first of which is `part` of its panel.
template <typename Format, int kRows>
void sum_blocks(const QuantizedRowLayout& layout, const uint8_t* rows, const uint8_t* panel,
                int64_t part, float (&out)[kRows][kFeatures]) {
  const int64_t row_bytes = layout.bytes();
  Floats sums[kRows][kVectors] = {};
  for (int64_t block = 0; block < layout.num_groups; ++block) {
    const uint8_t* w = panel + block * kBlockBytes<Format>;
    Ints dots[kRows][kVectors];
#pragma GCC unroll 6
    for (int row = 0; row < kRows; ++row) {
      const int32_t row_sum = layout.sums(rows + row * row_bytes)[block];
      for (int v = 0; v < kVectors; ++v) dots[row][v] = splat_int(-Format::kZero * row_sum);
    }
    add_block<Format>(dots, w + part * kQuad, rows + block * kQuads * kQuadBytes, row_bytes);
    const auto* scales = reinterpret_cast<const Float16*>(w + kValuesBytes<Format>) + part;
    const Floats d[kVectors] = {load(scales), load(scales + kLanes)};
#pragma GCC unroll 6
    for (int row = 0; row < kRows; ++row) {
      const float scale = layout.scales(rows + row * row_bytes)[block];
      for (int v = 0; v < kVectors; ++v) {
        const Floats products = __builtin_convertvector(dots[row][v], Floats);
        sums[row][v] = fma(products, d[v] * splat(scale), sums[row][v]);
      }
      if constexpr (Format::kHasMinimum) {
        const auto row_sum = static_cast<float>(layout.sums(rows + row * row_bytes)[block]);
        for (int v = 0; v < kVectors; ++v) {
          const Floats m = load(scales + kPanel + v * kLanes);
          sums[row][v] = fma(m, splat(scale * row_sum), sums[row][v]);
        }
      }
    }
  }
#pragma GCC unroll 6
  for (int row = 0; row < kRows; ++row) {
    for (int v = 0; v < kVectors; ++v) store(out[row] + v * kLanes, sums[row][v]);
  }
}

// out = sums + bias of n features, n <= kFeatures, rounded once.
template <typename T>
void store_sums(const float* sums, const T* bias, T* out, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) {
    Floats y = load(sums + i);
    if (bias != nullptr) y += load_first(bias + i, n - i);
    store_first(out + i, y, n - i);
  }
}

template <typename Format>
void multiply(DType dtype, const Linear& args, const LinearTile& tile) {
  const QuantizedRowLayout layout(args.format, args.in_features);
  const auto* rows = static_cast<const uint8_t*>(args.x) + tile.row * layout.bytes();
  for (int64_t first = tile.panel * kPanel; first < (tile.panel + tile.num_panels) * kPanel;
       first += kFeatures) {
    const int64_t n = min(kFeatures, args.out_features - first);
    if (n <= 0) return;
    const uint8_t* panel = static_cast<const uint8_t*>(args.weight) +
                           first / kPanel * layout.num_groups * kBlockBytes<Format>;
    in_row_parts<kMostRows>(tile.num_rows, [&]<int kRows>(int64_t row, Rows<kRows>) {
      alignas(64) float sums[kRows][kFeatures];
      sum_blocks<Format, kRows>(layout, rows + row * layout.bytes(), panel, first % kPanel, sums);
      visit(dtype, [&]<typename T>(T*) {
        const T* bias = args.bias == nullptr ? nullptr : static_cast<const T*>(args.bias) + first;
        for (int i = 0; i < kRows; ++i) {
          T* out = static_cast<T*>(args.out) + (tile.row + row + i) * args.out_features;
          store_sums(sums[i], bias, out + first, n);
        }
      });
    });
  }
}

}  // namespace

void linear_blocks(DType dtype, const Linear& args, const LinearTile& tile) {
  switch (args.format) {
    case WeightFormat::kQ8_0:
      return multiply<Q8_0>(dtype, args, tile);
    case WeightFormat::kQ4_0:
      return multiply<Q4_0>(dtype, args, tile);
    case WeightFormat::kQ4_1:
      return multiply<Q4_1>(dtype, args, tile);
    default:
      return;
  }
}

}  // namespace airside::cpu::AIRSIDE_ISA
