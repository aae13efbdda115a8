// Products with GGUF's blocks: 32 inputs with a scale of their own, and activations in blocks
// alike. A block's products are summed in integers. Then one chain in float32 goes over the blocks
// in ascending order, started at 0:
//
//   sum = fma(products, d * a, sum), and for Q4_1 after it sum = fma(m, a * sum(x), sum)
//
// where d and m are the weights' scale and minimum and a is the activations' scale.
#include "kernels/cpu/quantized_rows.h"
#include "kernels/cpu/tile_walk.h"

namespace airside::cpu::AIRSIDE_ISA {
namespace {

#if defined(__AVX512VNNI__)
constexpr int kMostRows = 6;
#elif defined(__AVX512F__)
constexpr int kMostRows = 4;
#else
constexpr int kMostRows = 2;
#endif
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

// out = sums + bias, rounded once.
template <typename Format, typename T, int kRows>
void compute(const Linear& args, const QuantizedRowLayout& layout, const LinearTile& tile,
             PanelBlock panel) {
  const int64_t row_bytes = layout.bytes();
  const uint8_t* rows = static_cast<const uint8_t*>(args.x) + (tile.row + panel.row) * row_bytes;
  Floats sums[kRows][kVectors] = {};
  for (int64_t block = 0; block < layout.num_groups; ++block) {
    if constexpr (kFetches<kRows, kMostRows>) panel.ahead.fetch();
    const uint8_t* w = panel.panel + block * kBlockBytes<Format>;
    Ints dots[kRows][kVectors];
#pragma GCC unroll 6
    for (int row = 0; row < kRows; ++row) {
      const int32_t row_sum = layout.sums(rows + row * row_bytes)[block];
      for (int v = 0; v < kVectors; ++v) dots[row][v] = splat_int(-Format::kZero * row_sum);
    }
    add_block<Format>(dots, w + panel.part * kQuad, rows + block * kQuads * kQuadBytes, row_bytes);
    const auto* scales = reinterpret_cast<const Float16*>(w + kValuesBytes<Format>) + panel.part;
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
  const T* bias = args.bias == nullptr ? nullptr : static_cast<const T*>(args.bias) + panel.feature;
  T* out = static_cast<T*>(args.out) + (tile.row + panel.row) * args.out_features + panel.feature;
#pragma GCC unroll 6
  for (int row = 0; row < kRows; ++row) {
    for (int v = 0; v < kVectors; ++v) {
      const int64_t left = panel.num_features - v * kLanes;
      if (left <= 0) break;
      Floats y = sums[row][v];
      if (bias != nullptr) y += load_first(bias + v * kLanes, left);
      store_first(out + row * args.out_features + v * kLanes, y, left);
    }
  }
}

template <typename Format>
void multiply(DType dtype, const Linear& args, const LinearTile& tile) {
  const QuantizedRowLayout layout(args.format, args.in_features);
  visit(dtype, [&]<typename T>(T*) {
    walk_tile<kMostRows>(args, tile, layout.num_groups * kBlockBytes<Format>, layout.num_groups,
                         [&]<int kRows>(Rows<kRows>, const PanelBlock& block) {
                           compute<Format, T, kRows>(args, layout, tile, block);
                         });
  });
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
