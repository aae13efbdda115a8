#include "kernels/cpu/isa.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/vector.h"

namespace airside::cpu::AIRSIDE_ISA {
namespace {

template <typename T>
void silu_and_mul_row(const T* gate, const T* up, T* out, int64_t width) {
  for (int64_t i = 0; i < width; i += kLanes) {
    const int64_t left = width - i;
    const Floats x = load_first(gate + i, left);
    const Floats silu = x / (splat(1.0f) + exp(-x));
    store_first(out + i, rounded<T>(silu) * load_first(up + i, left), left);
  }
}

}  // namespace

void silu_and_mul(DType dtype, const GatedAct& args) {
  visit(dtype, [&]<typename T>(T*) {
    parallel_for(args.num_rows, 2 * args.width, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const T* gate = static_cast<const T*>(args.gate_up) + row * args.gate_up_stride;
        silu_and_mul_row(gate, gate + args.width, static_cast<T*>(args.out) + row * args.width,
                         args.width);
      }
    });
  });
}

}  // namespace airside::cpu::AIRSIDE_ISA
