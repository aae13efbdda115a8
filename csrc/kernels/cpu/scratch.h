#pragma once

#include <cstdint>

namespace airside::cpu {

// At least `count` floats at a multiple of 64 bytes, kept by the calling thread until its next
// call.
float* scratch_floats(int64_t count);

}  // namespace airside::cpu
