// Products of 8-bit integers: a scale per output feature, and one per row of activations. The sums
// are exact, and what follows is rounded alike everywhere: all instruction sets agree to the bit.
#include "kernels/cpu/quantized_rows.h"

namespace airside::cpu::AIRSIDE_ISA {
namespace {

#if defined(__AVX512VNNI__)
constexpr int kMostRows = 12;
#elif defined(__AVX512F__)
constexpr int kMostRows = 8;
#else
constexpr int kMostRows = 4;
#endif
constexpr int kVectors = 2;  // registers of features beside each other
constexpr int kFeatures = kVectors * kLanes;
constexpr int32_t kZero = 128;  // of the weights

// The sums of kRows rows and kFeatures features, less the weights' zero point.
template <int kRows>
void sum_products(const uint8_t* rows, int64_t row_bytes, const int32_t (&row_sums)[kRows],
                  const uint8_t* weights, int64_t num_quads, int32_t (&out)[kRows][kFeatures]) {
  Ints sums[kRows][kVectors];
#pragma GCC unroll 12
  for (int row = 0; row < kRows; ++row) {
    for (int v = 0; v < kVectors; ++v) sums[row][v] = splat_int(-kZero * row_sums[row]);
  }
  for (int64_t quad = 0; quad < num_quads; ++quad) {
    const uint8_t* w = weights + quad * kPanel * kQuad;
    const WeightQuad w0(load_ints(w));
    const WeightQuad w1(load_ints(w + kLanes * kQuad));
#pragma GCC unroll 12
    for (int row = 0; row < kRows; ++row) {
      const RowQuad x(rows + row * row_bytes + quad * kQuadBytes);
      sums[row][0] = multiply_quads(sums[row][0], w0, x);
      sums[row][1] = multiply_quads(sums[row][1], w1, x);
    }
  }
#pragma GCC unroll 12
  for (int row = 0; row < kRows; ++row) {
    for (int v = 0; v < kVectors; ++v) store_ints(out[row] + v * kLanes, sums[row][v]);
  }
}

// out = sums * (row_scale * scales) + bias for n features, n <= kFeatures.
template <typename T>
void scale_sums(const int32_t* sums, float row_scale, const float* scales, const T* bias, T* out,
                int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) {
    Floats y = __builtin_convertvector(load_ints(sums + i), Floats);
    y *= splat(row_scale) * load(scales + i);
    if (bias != nullptr) y += load_first(bias + i, n - i);
    store_first(out + i, y, n - i);
  }
}

}  // namespace

void linear_int8(DType dtype, const Linear& args, const LinearTile& tile) {
  const QuantizedRowLayout layout(args.format, args.in_features);
  const int64_t num_quads = (args.in_features + kQuad - 1) / kQuad;
  const int64_t bytes = panel_bytes(args.format, args.in_features);
  const auto* rows = static_cast<const uint8_t*>(args.x) + tile.row * layout.bytes();
  for (int64_t i = 0; i < tile.num_panels; ++i) {
    const int64_t panel = tile.panel + i;
    const uint8_t* weights = static_cast<const uint8_t*>(args.weight) + panel * bytes;
    const auto* scales = reinterpret_cast<const float*>(weights + num_quads * kPanel * kQuad);
    for (int64_t part = 0; part < kPanel; part += kFeatures) {
      const int64_t feature = panel * kPanel + part;
      const int64_t n = min(kFeatures, args.out_features - feature);
      if (n <= 0) break;
      in_row_parts<kMostRows>(tile.num_rows, [&]<int kRows>(int64_t first, Rows<kRows>) {
        const uint8_t* block = rows + first * layout.bytes();
        int32_t row_sums[kRows];
        for (int row = 0; row < kRows; ++row) {
          row_sums[row] = *layout.sums(block + row * layout.bytes());
        }
        alignas(64) int32_t sums[kRows][kFeatures];
        sum_products<kRows>(block, layout.bytes(), row_sums, weights + part * kQuad, num_quads,
                            sums);
        visit(dtype, [&]<typename T>(T*) {
          for (int row = 0; row < kRows; ++row) {
            const auto* bias = static_cast<const T*>(args.bias);
            T* out = static_cast<T*>(args.out) + (tile.row + first + row) * args.out_features;
            scale_sums(sums[row], *layout.scales(block + row * layout.bytes()), scales + part,
                       bias == nullptr ? nullptr : bias + feature, out + feature, n);
          }
        });
      });
    }
  }
}

}  // namespace airside::cpu::AIRSIDE_ISA
