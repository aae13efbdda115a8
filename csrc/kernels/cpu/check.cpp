#include "kernels/cpu/check.h"

#include <sstream>
#include <string>

namespace airside::cpu {
namespace {

using tvm::ffi::TensorView;

std::string join(const int64_t* values, size_t count) {
  std::ostringstream out;
  out << "[";
  for (size_t i = 0; i < count; ++i) out << (i == 0 ? "" : ", ") << values[i];
  out << "]";
  return out.str();
}

std::string describe(const TensorView& x) {
  std::ostringstream out;
  out << tvm::ffi::DLDataTypeToString(x.dtype()) << " " << join(x.shape().data(), x.shape().size())
      << " with strides " << join(x.strides().data(), x.strides().size());
  return out.str();
}

bool same(DLDataType a, DLDataType b) {
  return a.code == b.code && a.bits == b.bits && a.lanes == b.lanes;
}

bool same_shape(const TensorView& x, std::initializer_list<int64_t> shape) {
  if (x.ndim() != static_cast<int32_t>(shape.size())) return false;
  int32_t axis = 0;
  for (const int64_t size : shape) {
    if (x.size(axis++) != size) return false;
  }
  return true;
}

// Whether the axes from `first_axis` on lie densely; an axis of one entry may claim any stride.
bool dense_from(const TensorView& x, int32_t first_axis) {
  if (x.numel() == 0) return true;
  int64_t stride = 1;
  for (int32_t axis = x.ndim() - 1; axis >= first_axis; --axis) {
    if (x.size(axis) != 1 && x.stride(axis) != stride) return false;
    stride *= x.size(axis);
  }
  return true;
}

}  // namespace

DType activation_dtype(ArgName name, const TensorView& x) {
  if (same(x.dtype(), kFloat32)) return DType::kFloat32;
  if (same(x.dtype(), {kDLBfloat, 16, 1})) return DType::kBFloat16;
  if (same(x.dtype(), {kDLFloat, 16, 1})) return DType::kFloat16;
  TVM_FFI_THROW(ValueError) << name.op << ": " << name.arg
                            << " must be float32, bfloat16 or float16, got " << describe(x);
}

void expect_rank(ArgName name, const TensorView& x, int rank) {
  if (x.ndim() != rank) {
    TVM_FFI_THROW(ValueError) << name.op << ": " << name.arg << " must have " << rank
                              << " dimensions, got " << describe(x);
  }
}

void expect(ArgName name, const TensorView& x, DLDataType dtype,
            std::initializer_list<int64_t> shape, Layout layout) {
  const bool on_cpu = x.device().device_type == kDLCPU;
  if (on_cpu && same(x.dtype(), dtype) && same_shape(x, shape) &&
      dense_from(x, layout == Layout::kRows ? 1 : 0)) {
    return;
  }
  TVM_FFI_THROW(ValueError) << name.op << ": " << name.arg << " must be "
                            << tvm::ffi::DLDataTypeToString(dtype) << " "
                            << join(shape.begin(), shape.size())
                            << (layout == Layout::kRows ? " with contiguous rows"
                                                        : " and contiguous")
                            << " on the CPU, got " << describe(x)
                            << (on_cpu ? "" : " on another device");
}

void expect_in(ArgName name, int64_t value, int64_t low, int64_t high) {
  if (value < low || value >= high) {
    TVM_FFI_THROW(ValueError) << name.op << ": " << name.arg << " must be at least " << low
                              << " and below " << high << ", got " << value;
  }
}

}  // namespace airside::cpu
