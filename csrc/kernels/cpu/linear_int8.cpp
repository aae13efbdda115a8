// Products of 8-bit integers: a scale per output feature, and one per row of activations. The sums
// are exact, and what follows is rounded alike everywhere: all instruction sets agree to the bit.
#include "kernels/cpu/quantized_rows.h"
#include "kernels/cpu/tile_walk.h"

namespace airside::cpu::AIRSIDE_ISA {
namespace {

#if defined(__AVX512VNNI__)
constexpr int kMostRows = 12;
#elif defined(__AVX512F__)
constexpr int kMostRows = 8;
#else
constexpr int kMostRows = 4;
#endif
constexpr int32_t kZero = 128;  // of the weights

// out = sums * (row_scale * scales) + bias, rounded once; the sums are of integers, less the
// weights' zero point.
template <typename T, int kRows>
void compute(const Linear& args, const QuantizedRowLayout& layout, const LinearTile& tile,
             PanelBlock block) {
  const int64_t num_quads = (args.in_features + kQuad - 1) / kQuad;
  const int64_t row_bytes = layout.bytes();
  const uint8_t* rows = static_cast<const uint8_t*>(args.x) + (tile.row + block.row) * row_bytes;
  const uint8_t* w = block.panel + block.part * kQuad;
  Ints sums[kRows][kVectors];
#pragma GCC unroll 12
  for (int row = 0; row < kRows; ++row) {
    const Ints start = splat_int(-kZero * *layout.sums(rows + row * row_bytes));
    for (int v = 0; v < kVectors; ++v) sums[row][v] = start;
  }
  const uint8_t* x = rows;
  for (int64_t quad = 0; quad < num_quads; ++quad) {
    if constexpr (kFetches<kRows, kMostRows>) block.ahead.fetch();
    const WeightQuad w0(load_ints(w));
    const WeightQuad w1(load_ints(w + kLanes * kQuad));
#pragma GCC unroll 12
    for (int row = 0; row < kRows; ++row) {
      const RowQuad operand(x + row * row_bytes);
      sums[row][0] = multiply_quads(sums[row][0], w0, operand);
      sums[row][1] = multiply_quads(sums[row][1], w1, operand);
    }
    x += kQuadBytes;
    w += kPanel * kQuad;
  }
  const auto* scales =
      reinterpret_cast<const float*>(block.panel + num_quads * kPanel * kQuad) + block.part;
  const T* bias = args.bias == nullptr ? nullptr : static_cast<const T*>(args.bias) + block.feature;
  T* out = static_cast<T*>(args.out) + (tile.row + block.row) * args.out_features + block.feature;
#pragma GCC unroll 2
  for (int v = 0; v < kVectors; ++v) {
    const int64_t left = block.num_features - v * kLanes;
    if (left <= 0) break;
    const Floats scale = load(scales + v * kLanes);
    const Floats addend = bias == nullptr ? Floats{} : load_first(bias + v * kLanes, left);
#pragma GCC unroll 12
    for (int row = 0; row < kRows; ++row) {
      Floats y = __builtin_convertvector(sums[row][v], Floats);
      y *= splat(*layout.scales(rows + row * row_bytes)) * scale;
      if (bias != nullptr) y += addend;
      store_first(out + row * args.out_features + v * kLanes, y, left);
    }
  }
}

}  // namespace

void linear_int8(DType dtype, const Linear& args, const LinearTile& tile) {
  const QuantizedRowLayout layout(args.format, args.in_features);
  const int64_t num_quads = (args.in_features + kQuad - 1) / kQuad;
  visit(dtype, [&]<typename T>(T*) {
    walk_tile<kMostRows>(args, tile, panel_bytes(args.format, args.in_features), num_quads,
                         [&]<int kRows>(Rows<kRows>, const PanelBlock& block) {
                           compute<T, kRows>(args, layout, tile, block);
                         });
  });
}

}  // namespace airside::cpu::AIRSIDE_ISA
