#include "kernels/cpu/isa.h"
#include "kernels/cpu/scratch.h"
#include "kernels/cpu/vector.h"

// Products with a weight of the activations' dtype. Each sum is one chain in float32 over the
// inputs in ascending order, started at 0; the bias is added to it, and the result rounded once.
// bfloat16's dot-product instruction adds a pair of inputs at a time, the second first, and takes
// subnormal inputs and sums for 0.
namespace airside::cpu::AIRSIDE_ISA {
namespace {

// As many rows by two registers of outputs as the registers hold beside a step's operands.
#if defined(__AVX512F__)
constexpr int kBlockRows = 12;
#else
constexpr int kBlockRows = 6;
#endif
// Blocks of so many rows and more prefetch the weights of the next; smaller ones read so fast that
// they would be held up by it.
constexpr int kPrefetchRows = kBlockRows / 2;
constexpr int kVectors = 2;
constexpr int64_t kOutputs = kVectors * kLanes;

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
struct Rows {
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
Rows<X> rows_of(const Linear& args, const LinearTile& tile) {
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

// ---- a block of rows by kOutputs outputs

template <typename T>
struct Block {
  Rows<typename Step<T>::X> rows;
  const T* weight;  // the block's first output of the panel's first input
  const T* bias;    // of the first output, or null
  T* out;
  int64_t in_features;
  int64_t out_stride;
  int64_t num_outputs;  // at most kOutputs
  int64_t ahead;        // bytes from the weights that are read to those that are prefetched
};

// The last block that reads a panel brings the next one into the second-level cache. Panels that do
// not stay there between two blocks are prefetched from a fixed distance by every block.
inline int64_t prefetch_distance(int64_t panel_bytes, bool last) {
  constexpr int64_t kPanelBytesKept = 512 << 10;
  constexpr int64_t kDistance = 128 << 10;
  if (panel_bytes > kPanelBytesKept) return kDistance;
  return last ? panel_bytes : 0;
}

template <typename T>
[[gnu::always_inline]] inline void prefetch(const T* w, int64_t ahead) {
  constexpr int64_t kBytes = Step<T>::kGroup * kOutputs * int64_t{sizeof(T)};
#pragma GCC unroll 4
  for (int64_t i = 0; i < kBytes; i += 64) {
    __builtin_prefetch(reinterpret_cast<const char*>(w) + ahead + i, 0, 2);
  }
}

template <typename T, int kRows>
void compute(const Block<T>& block) {
  constexpr int64_t kGroup = Step<T>::kGroup;
  Floats sums[kRows][kVectors] = {};
  const auto* x = block.rows.first;
  const T* w = block.weight;
  for (int64_t in = 0; in < block.in_features; in += kGroup) {
    if constexpr (kRows >= kPrefetchRows) prefetch(w, block.ahead);
    Step<T>::template add<kRows>(x, block.rows.stride, w, sums);
    x += kGroup;
    w += kGroup * kPanel;
  }
#pragma GCC unroll 2
  for (int v = 0; v < kVectors; ++v) {
    const int64_t left = block.num_outputs - v * kLanes;
    if (left <= 0) break;
    const Floats bias =
        block.bias == nullptr ? Floats{} : load_first(block.bias + v * kLanes, left);
#pragma GCC unroll 12
    for (int row = 0; row < kRows; ++row) {
      const Floats sum = block.bias == nullptr ? sums[row][v] : sums[row][v] + bias;
      store_first(block.out + row * block.out_stride + v * kLanes, sum, left);
    }
  }
}

template <typename T, int kRows = kBlockRows>
void compute(const Block<T>& block, int64_t num_rows) {
  if constexpr (kRows > 1) {
    if (num_rows < kRows) return compute<T, kRows - 1>(block, num_rows);
  }
  compute<T, kRows>(block);
}

template <typename T>
void compute_tile(const Linear& args, const LinearTile& tile) {
  const auto rows = rows_of<T, typename Step<T>::X>(args, tile);
  const int64_t panel_size = round_up(args.in_features, Step<T>::kGroup) * kPanel;
  const int64_t num_blocks = (tile.num_rows + kBlockRows - 1) / kBlockRows;
  const int64_t first = tile.panel * kPanel;
  const int64_t last = min(first + tile.num_panels * kPanel, args.out_features);
  for (int64_t output = first; output < last; output += kOutputs) {
    const T* weight = static_cast<const T*>(args.weight) + output / kPanel * panel_size +
                      output % kPanel * Step<T>::kGroup;
    for (int64_t i = 0; i < num_blocks; ++i) {
      const int64_t begin = tile.num_rows * i / num_blocks;
      const int64_t end = tile.num_rows * (i + 1) / num_blocks;
      compute<T>(
          {.rows = {rows.first + begin * rows.stride, rows.stride},
           .weight = weight,
           .bias = args.bias == nullptr ? nullptr : static_cast<const T*>(args.bias) + output,
           .out = static_cast<T*>(args.out) + (tile.row + begin) * args.out_features + output,
           .in_features = args.in_features,
           .out_stride = args.out_features,
           .num_outputs = min(kOutputs, args.out_features - output),
           .ahead = prefetch_distance(panel_size * int64_t{sizeof(T)}, i + 1 == num_blocks)},
          end - begin);
    }
  }
}

}  // namespace

void linear_float(DType activation, const Linear& args, const LinearTile& tile) {
  visit(activation, [&]<typename T>(T*) { compute_tile<T>(args, tile); });
}

}  // namespace airside::cpu::AIRSIDE_ISA
