// What ops.py calls to look into packed weights: checks, then the kernel.

#include <tvm/ffi/tvm_ffi.h>

#include <string>

#include "kernels/cpu/check.h"
#include "kernels/cpu/packed_weight.h"
#include "kernels/cpu/program.h"

namespace airside::cpu {
namespace {

using tvm::ffi::TensorView;

void gather_packed_rows_bound(TensorView weight, const std::string& name, int64_t out_features,
                              int64_t in_features, TensorView rows, TensorView out) {
  const char* op = "gather_packed_rows";
  const std::optional<WeightFormat> format = weight_format(name);
  if (!format || is_quantized(*format)) {
    TVM_FFI_THROW(ValueError) << op << ": weight format " << name << " does not keep all bits";
  }
  expect_in({op, "out_features"}, out_features, 0, int64_t{1} << 31);
  expect_in({op, "in_features"}, in_features, 0, int64_t{1} << 31);
  const int64_t num_panels = (out_features + kPanel - 1) / kPanel;
  expect({op, "weight"}, weight, kUInt8, {num_panels * panel_bytes(*format, in_features)});
  expect_rank({op, "rows"}, rows, 1);
  const int64_t count = rows.size(0);
  expect({op, "rows"}, rows, kInt64, {count});
  const DType dtype = activation_dtype({op, "out"}, out);
  expect({op, "out"}, out, out.dtype(), {count, in_features});
  if (panel_bytes(*format, 2) != 2 * kPanel * size_of(dtype)) {
    TVM_FFI_THROW(ValueError) << op << ": out must be " << name << " as the weight is";
  }
  for (int64_t i = 0; recording() == nullptr && i < count; ++i) {
    expect_in({op, "a row"}, data<const int64_t>(rows)[i], 0, out_features);
  }
  submit(op, gather_packed_rows, dtype,
         {.weight = data(weight),
          .rows = data<const int64_t>(rows),
          .out = data(out),
          .format = *format,
          .num_rows = count,
          .in_features = in_features},
         &GatherPackedRows::num_rows);
}

int64_t weight_layout_bound() { return kWeightLayout; }

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(gather_packed_rows, gather_packed_rows_bound);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(weight_layout, weight_layout_bound);

}  // namespace airside::cpu
