#pragma once

#include <cstdint>

namespace airside::cpu {

// Memory of this thread, 64-byte aligned, kept between calls; what is in it lasts until the next
// call.
float* scratch_floats(int64_t count);

// The same once more, for what its other threads read too.
float* shared_scratch_floats(int64_t count);

}  // namespace airside::cpu
