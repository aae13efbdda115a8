#pragma once

#include <cstdint>

namespace airside::cpu {

enum class DType { kFloat32, kBFloat16, kFloat16 };

// The bits of a half-width float. Arithmetic happens in float, after vector.h has widened them.
struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

constexpr int64_t size_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

}  // namespace airside::cpu
