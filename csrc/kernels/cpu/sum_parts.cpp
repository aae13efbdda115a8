#include "kernels/cpu/isa.h"
#include "kernels/cpu/vector.h"

namespace airside::cpu::AIRSIDE_ISA {
namespace {

template <typename T>
void sum_parts_of(const SumParts& args) {
  const T* first = static_cast<const T*>(args.parts[0]);
  T* out = static_cast<T*>(args.out);
  for (int64_t i = 0; i < args.count; i += kLanes) {
    const int64_t left = args.count - i;
    Floats sum = load_first(first + i, left);
    for (int64_t part = 1; part < args.num_parts; ++part) {
      sum += load_first(static_cast<const T*>(args.parts[part]) + i, left);
    }
    store_first(out + i, sum, left);
  }
}

}  // namespace

void sum_parts(DType dtype, const SumParts& args) {
  visit(dtype, [&]<typename T>(T*) { sum_parts_of<T>(args); });
}

}  // namespace airside::cpu::AIRSIDE_ISA
