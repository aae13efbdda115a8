#include <cstddef>
#include <cstring>

#include "kernels/cpu/kernels.h"
#include "kernels/cpu/parallel.h"

namespace airside::cpu {

void gather_rows(DType dtype, const GatherRows& args) {
  const int64_t bytes = args.width * size_of(dtype);
  const auto* x = static_cast<const std::byte*>(args.x);
  auto* out = static_cast<std::byte*>(args.out);
  AIRSIDE_ISA::parallel_for(args.num_rows, args.width, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      std::memcpy(out + i * bytes, x + args.rows[i] * args.x_stride * size_of(dtype), bytes);
    }
  });
}

}  // namespace airside::cpu
