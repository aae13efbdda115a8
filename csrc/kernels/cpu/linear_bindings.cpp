// What ops.py calls to pack weights and to multiply with them: checks, then the kernel.

#include <tvm/ffi/tvm_ffi.h>

#include <optional>
#include <string>

#include "kernels/cpu/check.h"
#include "kernels/cpu/kernels.h"
#include "kernels/cpu/program.h"

namespace airside::cpu {
namespace {

using tvm::ffi::TensorView;

WeightFormat format_of(const char* op, const std::string& name) {
  const std::optional<WeightFormat> format = weight_format(name);
  if (!format) TVM_FFI_THROW(ValueError) << op << ": there is no weight format " << name;
  return *format;
}

// The dtype of a weight that is packed as it is, and then of the activations too.
std::optional<DType> own_dtype(WeightFormat format) {
  switch (format) {
    case WeightFormat::kFloat32:
      return DType::kFloat32;
    case WeightFormat::kBFloat16:
      return DType::kBFloat16;
    case WeightFormat::kFloat16:
      return DType::kFloat16;
    default:
      return std::nullopt;
  }
}

void expect_dtype_of_format(ArgName name, const TensorView& x, const std::string& format) {
  const std::optional<DType> own = own_dtype(format_of(name.op, format));
  if (own && activation_dtype(name, x) != *own) {
    TVM_FFI_THROW(ValueError) << name.op << ": " << name.arg << " must be " << format
                              << " as the weight's format is, got "
                              << tvm::ffi::DLDataTypeToString(x.dtype());
  }
}

void expect_panels(ArgName name, const TensorView& panels, WeightFormat format,
                   int64_t out_features, int64_t in_features) {
  expect_in({name.op, "out_features"}, out_features, 0, int64_t{1} << 31);
  expect_in({name.op, "in_features"}, in_features, 0, int64_t{1} << 31);
  const int64_t num_panels = (out_features + kPanel - 1) / kPanel;
  expect(name, panels, kUInt8, {num_panels * panel_bytes(format, in_features)});
  if (reinterpret_cast<uintptr_t>(data(panels)) % 64 != 0) {
    TVM_FFI_THROW(ValueError) << name.op << ": " << name.arg << " must start at a multiple of 64";
  }
}

int64_t packed_bytes_bound(const std::string& format, int64_t out_features, int64_t in_features) {
  const int64_t num_panels = (out_features + kPanel - 1) / kPanel;
  return num_panels * panel_bytes(format_of("packed_bytes", format), in_features);
}

int64_t block_bytes_bound(const std::string& format) {
  const int64_t bytes = block_bytes(format_of("block_bytes", format));
  if (bytes == 0) TVM_FFI_THROW(ValueError) << "weight format " << format << " has no blocks";
  return bytes;
}

void expect_inputs(const char* op, WeightFormat format, int64_t in_features) {
  if (format == WeightFormat::kInt8) {
    expect_in({op, "in_features of int8"}, in_features, 0, kInt8InputsMax + 1);
  } else if (is_quantized(format) && in_features % kGgufBlock != 0) {
    TVM_FFI_THROW(ValueError) << op << ": in_features must be a multiple of " << kGgufBlock
                              << ", got " << in_features;
  }
}

void pack_blocks_bound(TensorView blocks, const std::string& name, TensorView out) {
  const char* op = "pack_blocks";
  const WeightFormat format = format_of(op, name);
  expect_rank({op, "blocks"}, blocks, 2);
  expect({op, "blocks"}, blocks, kUInt8, {blocks.size(0), blocks.size(1)});
  const int64_t bytes = block_bytes_bound(name);
  if (blocks.size(1) % bytes != 0) {
    TVM_FFI_THROW(ValueError) << op << ": rows of " << blocks.size(1) << " bytes are no blocks of "
                              << name;
  }
  const int64_t in_features = blocks.size(1) / bytes * kGgufBlock;
  expect_panels({op, "out"}, out, format, blocks.size(0), in_features);
  pack_blocks(format, data<const uint8_t>(blocks), blocks.size(0), in_features, data(out));
}

void pack_weight_bound(TensorView weight, const std::string& format, TensorView out) {
  const char* op = "pack_weight";
  expect_rank({op, "weight"}, weight, 2);
  expect_dtype_of_format({op, "weight"}, weight, format);
  expect({op, "weight"}, weight, weight.dtype(), {weight.size(0), weight.size(1)});
  const WeightFormat kind = format_of(op, format);
  expect_inputs(op, kind, weight.size(1));
  expect_panels({op, "out"}, out, kind, weight.size(0), weight.size(1));
  if (block_bytes(kind) != 0) TVM_FFI_THROW(ValueError) << op << ": " << format << " is of blocks";
  if (kind == WeightFormat::kInt8) {
    const DType dtype = activation_dtype({op, "weight"}, weight);
    return pack_int8(dtype, data(weight), weight.size(0), weight.size(1), data(out));
  }
  pack_weight(kind, data(weight), weight.size(0), weight.size(1), data(out));
}

void linear_bound(TensorView x, TensorView weight, const std::string& format, int64_t out_features,
                  int64_t in_features, tvm::ffi::Optional<TensorView> bias, TensorView out) {
  const char* op = "linear";
  expect_rank({op, "x"}, x, 2);
  const int64_t num_rows = x.size(0);
  const DType dtype = activation_dtype({op, "x"}, x);
  expect_dtype_of_format({op, "x"}, x, format);
  expect({op, "x"}, x, x.dtype(), {num_rows, in_features}, Layout::kRows);
  expect_inputs(op, format_of(op, format), in_features);
  expect_panels({op, "weight"}, weight, format_of(op, format), out_features, in_features);
  if (bias) expect({op, "bias"}, *bias, x.dtype(), {out_features});
  expect({op, "out"}, out, x.dtype(), {num_rows, out_features});
  submit(op, linear, dtype,
         {.x = data(x),
          .weight = data(weight),
          .bias = bias ? data(*bias) : nullptr,
          .out = data(out),
          .format = format_of(op, format),
          .num_rows = num_rows,
          .in_features = in_features,
          .out_features = out_features,
          .x_stride = x.stride(0)},
         &Linear::num_rows);
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(packed_bytes, packed_bytes_bound);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(pack_weight, pack_weight_bound);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(block_bytes, block_bytes_bound);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(pack_blocks, pack_blocks_bound);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(linear, linear_bound);

}  // namespace airside::cpu
