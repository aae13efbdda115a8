#pragma once

#include <tvm/ffi/tvm_ffi.h>

#include <initializer_list>

#include "kernels/cpu/types.h"

// What an operator demands of a tensor; a tensor that differs is a ValueError that says what was
// expected.
namespace airside::cpu {

inline constexpr DLDataType kFloat32{kDLFloat, 32, 1};
inline constexpr DLDataType kFloat64{kDLFloat, 64, 1};
inline constexpr DLDataType kInt32{kDLInt, 32, 1};
inline constexpr DLDataType kUInt8{kDLUInt, 8, 1};
inline constexpr DLDataType kInt64{kDLInt, 64, 1};

// Names one argument of one operator in messages.
struct ArgName {
  const char* op;
  const char* arg;
};

enum class Layout { kContiguous, kRows };  // kRows: the first dimension may be strided

// The dtype of x if it is one that activations may have.
DType activation_dtype(ArgName name, const tvm::ffi::TensorView& x);

void expect_rank(ArgName name, const tvm::ffi::TensorView& x, int rank);

void expect(ArgName name, const tvm::ffi::TensorView& x, DLDataType dtype,
            std::initializer_list<int64_t> shape, Layout layout = Layout::kContiguous);

// Fails unless low <= value < high.
void expect_in(ArgName name, int64_t value, int64_t low, int64_t high);

template <typename T = void>
T* data(const tvm::ffi::TensorView& x) {
  return reinterpret_cast<T*>(static_cast<char*>(x.data_ptr()) + x.byte_offset());
}

}  // namespace airside::cpu
