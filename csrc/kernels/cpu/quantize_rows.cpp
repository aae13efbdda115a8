// Activations to 8-bit integers, before the products of a step.
#include "kernels/cpu/quantized_rows.h"

namespace airside::cpu::AIRSIDE_ISA {
namespace {

typedef uint8_t Bytes __attribute__((vector_size(kLanes)));

// Stores the low bytes of kLanes inputs' words.
void store_quads(uint8_t* p, Words x) {
#if defined(__AVX512VNNI__)
  const Bytes bytes = __builtin_convertvector(x, Bytes);
  __builtin_memcpy(p, &bytes, sizeof bytes);
#else
  // In each quad inputs 1 and 2 change places.
  const auto lanes = [&]<int... kLane>(std::integer_sequence<int, kLane...>) {
    return __builtin_shufflevector(x, x,
                                   ((kLane & 3) == 1 || (kLane & 3) == 2 ? kLane ^ 3 : kLane)...);
  }(std::make_integer_sequence<int, kLanes>{});
  const Halves halves = __builtin_convertvector(lanes, Halves);
  __builtin_memcpy(p, &halves, sizeof halves);
#endif
}

int32_t sum_of_ints(Ints x) {
  int32_t sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += x[i];
  return sum;
}

Ints larger_int(Ints a, Ints b) { return a > b ? a : b; }

// max|x| / 127; NaN if an input is not finite.
template <typename T>
float scale_of(const T* x, int64_t n) {
  // Without its sign, a float is the larger the larger its bits are; those of inf and NaN come
  // last.
  Ints tops = {};
  for (int64_t i = 0; i < n; i += kLanes) {
    const Words magnitude = words_of(load_first(x + i, n - i)) & 0x7fffffff;
    tops = larger_int(tops, __builtin_bit_cast(Ints, magnitude));
  }
  int32_t top = 0;
  for (int i = 0; i < kLanes; ++i) top = tops[i] > top ? tops[i] : top;
  return top >= 0x7f800000 ? __builtin_nanf("") : __builtin_bit_cast(float, top) / 127.0f;
}

// Returns the sum of the n values it stores, which are x * (1 / scale) to nearest, ties to even;
// zeros where the scale is too small to have an inverse.
template <typename T>
int32_t quantize(const T* x, int64_t n, float scale, uint8_t* out) {
  const Floats inverse = splat(scale >= __FLT_MIN__ ? 1.0f / scale : 0.0f);
  const Floats most = splat(127.0f);  // may be passed by a rounding
  Words sum = {};
  for (int64_t i = 0; i < n; i += kLanes) {
    const Floats v = load_first(x + i, n - i) * inverse;
    const Floats within = v > most ? most : (v >= -most ? v : -most);  // NaN is as good as any
    const Words shifted = words_of(within + splat(0x1.8p23f));  // the low bits are the integer
    sum += shifted - 0x4b400000u;
    store_quads(out + i / kQuad * kQuadBytes, shifted);
  }
  return sum_of_ints(__builtin_bit_cast(Ints, sum));
}

template <typename T>
void quantize_row(const T* x, int64_t in_features, const QuantizedRowLayout& layout, uint8_t* out) {
  float* scales = const_cast<float*>(layout.scales(out));
  int32_t* sums = const_cast<int32_t*>(layout.sums(out));
  for (int64_t group = 0; group < layout.num_groups; ++group) {
    const int64_t first = group * layout.group;
    const int64_t n = min(layout.group, in_features - first);
    scales[group] = scale_of(x + first, n);
    sums[group] = quantize(x + first, n, scales[group], out + first / kQuad * kQuadBytes);
  }
}

}  // namespace

int64_t quantized_row_bytes(WeightFormat format, int64_t in_features) {
  return QuantizedRowLayout(format, in_features).bytes();
}

void quantize_rows(DType dtype, const Linear& args, int64_t begin, int64_t end, uint8_t* rows) {
  const QuantizedRowLayout layout(args.format, args.in_features);
  visit(dtype, [&]<typename T>(T*) {
    for (int64_t row = begin; row < end; ++row) {
      quantize_row(static_cast<const T*>(args.x) + row * args.x_stride, args.in_features, layout,
                   rows + row * layout.bytes());
    }
  });
}

}  // namespace airside::cpu::AIRSIDE_ISA
