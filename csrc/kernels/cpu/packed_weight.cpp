#include "kernels/cpu/packed_weight.h"

#include <algorithm>

#include "kernels/cpu/parallel.h"

namespace airside::cpu {
namespace {

// [in_features / kGroup][kPanel][kGroup]; what the weight has not is 0.
template <typename T, int kGroup>
void pack_panel(const T* weight, int64_t out_features, int64_t in_features, T* panel) {
  const int64_t groups = (in_features + kGroup - 1) / kGroup;
  std::fill_n(panel, groups * kPanel * kGroup, T{});
  for (int64_t out = 0; out < out_features; ++out) {
    const T* row = weight + out * in_features;
    for (int64_t in = 0; in < in_features; ++in) {
      panel[in / kGroup * kPanel * kGroup + out * kGroup + in % kGroup] = row[in];
    }
  }
}

template <typename T, int kGroup>
void pack_panels(const void* weight, int64_t out_features, int64_t in_features, void* panels) {
  const int64_t num_panels = (out_features + kPanel - 1) / kPanel;
  const int64_t size = (in_features + kGroup - 1) / kGroup * kGroup * kPanel;
  AIRSIDE_ISA::parallel_for(num_panels, size, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      pack_panel<T, kGroup>(static_cast<const T*>(weight) + i * kPanel * in_features,
                            std::min(kPanel, out_features - i * kPanel), in_features,
                            static_cast<T*>(panels) + i * size);
    }
  });
}

// The inverse, of single rows.
template <typename T, int kGroup>
void gather(const GatherPackedRows& args) {
  const int64_t groups = (args.in_features + kGroup - 1) / kGroup;
  AIRSIDE_ISA::parallel_for(args.num_rows, args.in_features, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const T* panel = static_cast<const T*>(args.weight) +
                       args.rows[i] / kPanel * groups * kGroup * kPanel +
                       args.rows[i] % kPanel * kGroup;
      T* out = static_cast<T*>(args.out) + i * args.in_features;
      for (int64_t in = 0; in < args.in_features; ++in) {
        out[in] = panel[in / kGroup * kPanel * kGroup + in % kGroup];
      }
    }
  });
}

}  // namespace

std::optional<WeightFormat> weight_format(std::string_view name) {
  if (name == "float32") return WeightFormat::kFloat32;
  if (name == "bfloat16") return WeightFormat::kBFloat16;
  if (name == "float16") return WeightFormat::kFloat16;
  if (name == "int8") return WeightFormat::kInt8;
  if (name == "q8_0") return WeightFormat::kQ8_0;
  if (name == "q4_0") return WeightFormat::kQ4_0;
  if (name == "q4_1") return WeightFormat::kQ4_1;
  return std::nullopt;
}

int64_t panel_bytes(WeightFormat format, int64_t in_features) {
  switch (format) {
    case WeightFormat::kFloat32:
      return in_features * kPanel * 4;
    case WeightFormat::kBFloat16:
      return (in_features + 1) / 2 * kPanel * 4;
    case WeightFormat::kFloat16:
      return in_features * kPanel * 2;
    case WeightFormat::kInt8:
      return (in_features + 3) / 4 * 4 * kPanel + kPanel * 4;
    default:
      return in_features / kGgufBlock * block_bytes(format) * kPanel;
  }
}

int64_t block_bytes(WeightFormat format) {
  switch (format) {
    case WeightFormat::kQ8_0:
      return kGgufBlock + 2;
    case WeightFormat::kQ4_0:
      return kGgufBlock / 2 + 2;
    case WeightFormat::kQ4_1:
      return kGgufBlock / 2 + 4;
    default:
      return 0;
  }
}

void pack_weight(WeightFormat format, const void* weight, int64_t out_features, int64_t in_features,
                 void* panels) {
  switch (format) {
    case WeightFormat::kFloat32:
      return pack_panels<float, 1>(weight, out_features, in_features, panels);
    case WeightFormat::kBFloat16:
      return pack_panels<BFloat16, 2>(weight, out_features, in_features, panels);
    case WeightFormat::kFloat16:
      return pack_panels<Float16, 1>(weight, out_features, in_features, panels);
    default:
      return;
  }
}

void gather_packed_rows(DType /*dtype*/, const GatherPackedRows& args) {
  switch (args.format) {
    case WeightFormat::kFloat32:
      return gather<float, 1>(args);
    case WeightFormat::kBFloat16:
      return gather<BFloat16, 2>(args);
    case WeightFormat::kFloat16:
      return gather<Float16, 1>(args);
    default:
      return;
  }
}

}  // namespace airside::cpu
