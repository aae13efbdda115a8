// Weights as panels of integers: quantised here, or quantised before as GGUF files hold them.

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/cpu/packed_weight.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/scratch.h"
#include "kernels/cpu/vector.h"

namespace airside::cpu {
namespace {

constexpr int64_t kQuad = 4;  // inputs of one feature beside each other

// Calls body(first feature, number of features, panel) for every panel.
template <typename Body>
void for_panels(int64_t out_features, int64_t cost, int64_t bytes, void* panels, const Body& body) {
  const int64_t num_panels = (out_features + kPanel - 1) / kPanel;
  AIRSIDE_ISA::parallel_for(num_panels, cost, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      uint8_t* panel = static_cast<uint8_t*>(panels) + i * bytes;
      std::memset(panel, 0, bytes);
      body(i * kPanel, std::min(kPanel, out_features - i * kPanel), panel);
    }
  });
}

template <typename T>
void widen_row(const T* weight, int64_t n, float* row) {
  for (int64_t i = 0; i < n; i += AIRSIDE_ISA::kLanes) {
    AIRSIDE_ISA::store_first(row + i, AIRSIDE_ISA::load_first(weight + i, n - i), n - i);
  }
}

// One feature's scale, max|w| / 127; its inputs as w / scale + 128 to nearest, ties to even. NaN if
// a weight is not finite.
float quantize_feature(const float* row, int64_t n, uint8_t* panel) {
  float top = 0.0f;
  float not_finite = 0.0f;
  for (int64_t i = 0; i < n; ++i) {
    top = std::max(top, std::fabs(row[i]));
    not_finite += row[i] * 0.0f;
  }
  const float scale = top / 127.0f + not_finite;
  if (!(scale > 0.0f)) return scale;
  for (int64_t i = 0; i < n; ++i) {
    const float value = std::clamp(std::nearbyint(row[i] / scale), -127.0f, 127.0f);
    panel[i / kQuad * kPanel * kQuad + i % kQuad] = static_cast<uint8_t>(value + 128.0f);
  }
  return scale;
}

}  // namespace

void pack_int8(DType dtype, const void* weight, int64_t out_features, int64_t in_features,
               void* panels) {
  const int64_t values_bytes = (in_features + kQuad - 1) / kQuad * kQuad * kPanel;
  const auto pack_panel = [&](int64_t first, int64_t n, uint8_t* panel) {
    auto* scales = reinterpret_cast<float*>(panel + values_bytes);
    std::memset(panel, 128, values_bytes);
    float* row = scratch_floats(in_features);
    for (int64_t i = 0; i < n; ++i) {
      AIRSIDE_ISA::visit(dtype, [&]<typename T>(T*) {
        widen_row(static_cast<const T*>(weight) + (first + i) * in_features, in_features, row);
      });
      scales[i] = quantize_feature(row, in_features, panel + i * kQuad);
    }
  };
  for_panels(out_features, kPanel * in_features * 4, panel_bytes(WeightFormat::kInt8, in_features),
             panels, pack_panel);
}

void pack_blocks(WeightFormat format, const uint8_t* blocks, int64_t out_features,
                 int64_t in_features, void* panels) {
  const int64_t num_blocks = in_features / kGgufBlock;
  const int64_t halves = format == WeightFormat::kQ4_1 ? 2 : 1;  // before the values: d, then m
  const int64_t values = format == WeightFormat::kQ8_0 ? kGgufBlock : kGgufBlock / 2;
  const int64_t panel_block = block_bytes(format) * kPanel;
  const auto pack_block = [&](const uint8_t* block, int64_t feature, uint8_t* out) {
    const uint8_t zero = format == WeightFormat::kQ8_0 ? 128 : 0;
    for (int64_t i = 0; i < values; ++i) {
      out[i / kQuad * kPanel * kQuad + feature * kQuad + i % kQuad] = block[halves * 2 + i] ^ zero;
    }
    for (int64_t half = 0; half < halves; ++half) {
      std::memcpy(out + values * kPanel + (half * kPanel + feature) * 2, block + half * 2, 2);
    }
  };
  for_panels(out_features, kPanel * in_features, num_blocks * panel_block, panels,
             [&](int64_t first, int64_t n, uint8_t* panel) {
               for (int64_t i = 0; i < n; ++i) {
                 const uint8_t* row = blocks + (first + i) * num_blocks * block_bytes(format);
                 for (int64_t block = 0; block < num_blocks; ++block) {
                   pack_block(row + block * block_bytes(format), i, panel + block * panel_block);
                 }
               }
             });
}

}  // namespace airside::cpu
