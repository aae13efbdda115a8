#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "kernels/cpu/types.h"

// The weight of a linear layer as its kernels read it, laid out once when a model is loaded: panels
// of kPanel output features, one behind the other, each read from its first byte to its last. The
// last panel is filled up with zeros, and so is the last group of inputs.
namespace airside::cpu {

// Counts up with every change of what lies where in a panel: packed weights are kept on disk.
inline constexpr int64_t kWeightLayout = 1;

inline constexpr int64_t kPanel = 32;
inline constexpr int64_t kGgufBlock = 32;  // inputs of a GGUF block
// The most inputs whose 8-bit products fit a 32-bit sum.
inline constexpr int64_t kInt8InputsMax = int64_t{1} << 17;

enum class WeightFormat {
  kFloat32,   // [in_features][kPanel] float32
  kBFloat16,  // [in_features / 2][kPanel][2]: pairs of inputs, as the dot-product instruction takes
  kFloat16,   // [in_features][kPanel] halves
  kInt8,      // [in_features / 4][kPanel][4] bytes, value + 128; then scales [kPanel] float
  kQ8_0,      // GGUF's blocks of 32 inputs, a panel's side by side (linear_blocks.cpp)
  kQ4_0,
  kQ4_1,
};

// Rows of a weight, put together again.
struct GatherPackedRows {
  const void* weight;   // [panels] of a format that keeps all bits
  const int64_t* rows;  // [num_rows], output features
  void* out;            // [num_rows, in_features] of the format's dtype, contiguous
  WeightFormat format;
  int64_t num_rows;
  int64_t in_features;
};

// Activations are float32, bfloat16 or float16 whatever the format.
struct Linear {
  const void* x;       // [num_rows, in_features], rows x_stride apart; of quantised weights a
                       // tile's kernel takes what quantize_rows made
  const void* weight;  // [panels], 64-byte aligned
  const void* bias;    // [out_features] of x's dtype, or null
  void* out;           // [num_rows, out_features] of x's dtype, contiguous
  WeightFormat format;
  int64_t num_rows;
  int64_t in_features;
  int64_t out_features;
  int64_t x_stride;

  [[gnu::always_inline]] int64_t num_panels() const { return (out_features + kPanel - 1) / kPanel; }
};

// What one thread computes of a product at a time.
struct LinearTile {
  int64_t row;  // the first
  int64_t num_rows;
  int64_t panel;  // the first
  int64_t num_panels;
};

// The format of that name ("bfloat16", "q4_0"), if there is one with kernels.
std::optional<WeightFormat> weight_format(std::string_view name);

// Bytes of one panel.
int64_t panel_bytes(WeightFormat format, int64_t in_features);

constexpr bool is_quantized(WeightFormat format) { return format >= WeightFormat::kInt8; }

// Quantises `weight`, [out_features, in_features] of that dtype, contiguous, to kInt8.
void pack_int8(DType dtype, const void* weight, int64_t out_features, int64_t in_features,
               void* panels);

// Lays out blocks as a GGUF file holds them, [out_features][in_features / kGgufBlock], as panels.
void pack_blocks(WeightFormat format, const uint8_t* blocks, int64_t out_features,
                 int64_t in_features, void* panels);

// Bytes of one block of a GGUF file.
int64_t block_bytes(WeightFormat format);

// Lays out `weight`, [out_features, in_features] of the format's own dtype, contiguous, as panels.
void pack_weight(WeightFormat format, const void* weight, int64_t out_features, int64_t in_features,
                 void* panels);

void gather_packed_rows(DType dtype, const GatherPackedRows& args);

}  // namespace airside::cpu
