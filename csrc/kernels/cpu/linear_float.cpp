#include "kernels/cpu/isa.h"
#include "kernels/cpu/scratch.h"
#include "kernels/cpu/tile_walk.h"

// Products with a weight of the activations' dtype. Each sum is one chain in float32 over the
// inputs in ascending order, started at 0; the bias is added to it, and the result rounded once.
// bfloat16's dot-product instruction adds a pair of inputs at a time, the second first, and takes
// subnormal inputs and sums for 0.
namespace airside::cpu::AIRSIDE_ISA {
namespace {

// As many rows by two registers of outputs as the registers hold beside a step's operands.
#if defined(__AVX512F__)
constexpr int kMostRows = 12;
#else
constexpr int kMostRows = 6;
#endif

// ---- how one group of inputs enters the sums, by the weight's dtype

template <typename T>
struct Step {
  using X = float;  // what the rows are turned to first
  static constexpr int64_t kGroup = 1;

  template <int kRows>
  [[gnu::always_inline]] static void add(const float* x, int64_t x_stride, const T* w,
                                         Floats (&sums)[kRows][kVectors]) {
    const Floats weights[kVectors] = {load(w), load(w + kLanes)};
#pragma GCC unroll 12
    for (int row = 0; row < kRows; ++row) {
      const Floats operand = splat(x[row * x_stride]);
      sums[row][0] = fma(operand, weights[0], sums[row][0]);
      sums[row][1] = fma(operand, weights[1], sums[row][1]);
    }
  }
};

#if defined(__AVX512BF16__)

template <>
struct Step<BFloat16> {
  using X = BFloat16;
  static constexpr int64_t kGroup = 2;

  template <int kRows>
  [[gnu::always_inline]] static void add(const BFloat16* x, int64_t x_stride, const BFloat16* w,
                                         Floats (&sums)[kRows][kVectors]) {
    const auto weights_0 = __builtin_bit_cast(__m512bh, _mm512_loadu_si512(w));
    const auto weights_1 = __builtin_bit_cast(__m512bh, _mm512_loadu_si512(w + 2 * kLanes));
#pragma GCC unroll 12
    for (int row = 0; row < kRows; ++row) {
      int32_t pair;
      __builtin_memcpy(&pair, x + row * x_stride, sizeof pair);
      const auto operand = __builtin_bit_cast(__m512bh, _mm512_set1_epi32(pair));
      sums[row][0] = _mm512_dpbf16_ps(sums[row][0], operand, weights_0);
      sums[row][1] = _mm512_dpbf16_ps(sums[row][1], operand, weights_1);
    }
  }
};

#else

template <>
struct Step<BFloat16> {
  using X = float;
  static constexpr int64_t kGroup = 2;

  template <int kRows>
  [[gnu::always_inline]] static void add(const float* x, int64_t x_stride, const BFloat16* w,
                                         Floats (&sums)[kRows][kVectors]) {
    Words pairs[kVectors];
    __builtin_memcpy(pairs, w, sizeof pairs);
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      Floats weights[kVectors];
      for (int v = 0; v < kVectors; ++v) {
        weights[v] = floats_of(i == 0 ? pairs[v] << 16 : pairs[v] & 0xffff0000);
      }
#pragma GCC unroll 12
      for (int row = 0; row < kRows; ++row) {
        const Floats operand = splat(x[row * x_stride + i]);
        sums[row][0] = fma(operand, weights[0], sums[row][0]);
        sums[row][1] = fma(operand, weights[1], sums[row][1]);
      }
    }
  }
};

#endif

// ---- the rows of a tile as the step reads them

template <typename X>
struct Operands {
  const X* first;
  int64_t stride;  // in elements
};

inline void copy_row(const BFloat16* from, BFloat16* to, int64_t n) {
  __builtin_memcpy(to, from, n * sizeof *to);
}

template <typename T>
void copy_row(const T* from, float* to, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) store_first(to + i, load_first(from + i, n - i), n - i);
}

// Those of x where they serve, or a copy in the thread's scratch, filled up with zeros.
template <typename T, typename X>
Operands<X> operands_of(const Linear& args, const LinearTile& tile) {
  const T* x = static_cast<const T*>(args.x) + tile.row * args.x_stride;
  const int64_t padded = round_up(args.in_features, Step<T>::kGroup);
  if constexpr (sizeof(T) == sizeof(X)) {
    if (padded == args.in_features) return {reinterpret_cast<const X*>(x), args.x_stride};
  }
  X* copy = reinterpret_cast<X*>(scratch_floats(tile.num_rows * padded));
  for (int64_t row = 0; row < tile.num_rows; ++row) {
    X* to = copy + row * padded;
    copy_row(x + row * args.x_stride, to, args.in_features);
    for (int64_t i = args.in_features; i < padded; ++i) to[i] = X{};
  }
  return {copy, padded};
}

// ---- one block

template <typename T, int kRows>
void compute(const Linear& args, const Operands<typename Step<T>::X>& operands, int64_t first_row,
             PanelBlock block) {
  constexpr int64_t kGroup = Step<T>::kGroup;
  Floats sums[kRows][kVectors] = {};
  const auto* x = operands.first + block.row * operands.stride;
  const T* w = reinterpret_cast<const T*>(block.panel) + block.part * kGroup;
  for (int64_t in = 0; in < args.in_features; in += kGroup) {
    if constexpr (kFetches<kRows, kMostRows>) block.ahead.fetch();
    Step<T>::template add<kRows>(x, operands.stride, w, sums);
    x += kGroup;
    w += kGroup * kPanel;
  }
  const T* bias = args.bias == nullptr ? nullptr : static_cast<const T*>(args.bias) + block.feature;
  T* out = static_cast<T*>(args.out) + (first_row + block.row) * args.out_features + block.feature;
#pragma GCC unroll 2
  for (int v = 0; v < kVectors; ++v) {
    const int64_t left = block.num_features - v * kLanes;
    if (left <= 0) break;
    const Floats addend = bias == nullptr ? Floats{} : load_first(bias + v * kLanes, left);
#pragma GCC unroll 12
    for (int row = 0; row < kRows; ++row) {
      const Floats sum = bias == nullptr ? sums[row][v] : sums[row][v] + addend;
      store_first(out + row * args.out_features + v * kLanes, sum, left);
    }
  }
}

template <typename T>
void compute_tile(const Linear& args, const LinearTile& tile) {
  const auto operands = operands_of<T, typename Step<T>::X>(args, tile);
  const int64_t steps = (args.in_features + Step<T>::kGroup - 1) / Step<T>::kGroup;
  walk_tile<kMostRows>(args, tile, panel_bytes(args.format, args.in_features), steps,
                       [&]<int kRows>(Rows<kRows>, const PanelBlock& block) {
                         compute<T, kRows>(args, operands, tile.row, block);
                       });
}

}  // namespace

void linear_float(DType activation, const Linear& args, const LinearTile& tile) {
  visit(activation, [&]<typename T>(T*) { compute_tile<T>(args, tile); });
}

}  // namespace airside::cpu::AIRSIDE_ISA
