#include "kernels/cpu/isa.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/vector.h"

namespace airside::cpu::AIRSIDE_ISA {
namespace {

// Four partial sums hide the latency of the addition; the order depends on n alone.
template <typename T>
float sum_of_squares(const T* x, int64_t n) {
  constexpr int64_t kStep = 4 * kLanes;
  Floats sums[4] = {};
  int64_t i = 0;
  for (; i + kStep <= n; i += kStep) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const Floats v = load(x + i + j * kLanes);
      sums[j] = fma(v, v, sums[j]);
    }
  }
  for (; i < n; i += kLanes) {
    const Floats v = load_first(x + i, n - i);
    sums[0] = fma(v, v, sums[0]);
  }
  return sum_of((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

template <typename T>
void add(const T* x, T* residual, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) {
    const int64_t left = n - i;
    store_first(residual + i, load_first(residual + i, left) + load_first(x + i, left), left);
  }
}

template <typename T>
void normalise(const T* x, const T* weight, T* out, int64_t n, float eps, bool zero_centred) {
  const Floats factor =
      splat(1.0f / __builtin_sqrtf(sum_of_squares(x, n) / static_cast<float>(n) + eps));
  for (int64_t i = 0; i < n; i += kLanes) {
    const int64_t left = n - i;
    const Floats normal = load_first(x + i, left) * factor;
    const Floats scale = load_first(weight + i, left);
    store_first(out + i, zero_centred ? normal * (scale + splat(1.0f)) : rounded<T>(normal) * scale,
                left);
  }
}

template <typename T>
void rms_norm_rows(const RmsNorm& args, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(args.x) + row / args.group * args.x_stride +
                 row % args.group * args.hidden;
    if (args.residual != nullptr) {
      T* residual = static_cast<T*>(args.residual) + row * args.hidden;
      add(x, residual, args.hidden);
      x = residual;
    }
    normalise(x, static_cast<const T*>(args.weight), static_cast<T*>(args.out) + row * args.hidden,
              args.hidden, args.eps, args.zero_centred);
  }
}

}  // namespace

void rms_norm(DType dtype, const RmsNorm& args) {
  visit(dtype, [&]<typename T>(T*) {
    parallel_for(args.num_rows, args.hidden,
                 [&](int64_t begin, int64_t end) { rms_norm_rows<T>(args, begin, end); });
  });
}

}  // namespace airside::cpu::AIRSIDE_ISA
