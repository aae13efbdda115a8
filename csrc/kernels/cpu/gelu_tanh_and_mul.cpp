#include "kernels/cpu/isa.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/vector.h"

namespace airside::cpu::AIRSIDE_ISA {
namespace {

constexpr float kTwiceSqrt2OverPi = 1.5957691216057308f;

template <typename T>
void gelu_tanh_and_mul_row(const T* gate, const T* up, T* out, int64_t width) {
  for (int64_t i = 0; i < width; i += kLanes) {
    const int64_t left = width - i;
    const Floats x = load_first(gate + i, left);
    // x / 2 * (1 + tanh(z)) is x times the logistic function of 2 z.
    const Floats twice_z = splat(kTwiceSqrt2OverPi) * (x + splat(0.044715f) * x * x * x);
    const Floats gelu = x / (splat(1.0f) + exp(-twice_z));
    store_first(out + i, rounded<T>(gelu) * load_first(up + i, left), left);
  }
}

}  // namespace

void gelu_tanh_and_mul(DType dtype, const GatedAct& args) {
  visit(dtype, [&]<typename T>(T*) {
    parallel_for(args.num_rows, 2 * args.width, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const T* gate = static_cast<const T*>(args.gate_up) + row * args.gate_up_stride;
        gelu_tanh_and_mul_row(gate, gate + args.width, static_cast<T*>(args.out) + row * args.width,
                              args.width);
      }
    });
  });
}

}  // namespace airside::cpu::AIRSIDE_ISA
