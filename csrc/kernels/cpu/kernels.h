#pragma once

#include <cstdint>

#include "kernels/cpu/packed_weight.h"
#include "kernels/cpu/types.h"

// What the operators take: raw pointers, sizes, and strides in elements. Nothing here owns memory,
// and nothing is checked: bindings.cpp has done that.
namespace airside::cpu {

struct RmsNorm {
  const void* x;   // [num_rows, hidden]: groups of rows, contiguous in themselves, x_stride apart
  void* residual;  // [num_rows, hidden] contiguous; unless null, x is added to it first
  const void* weight;  // [hidden]
  void* out;           // [num_rows, hidden] contiguous
  int64_t num_rows;
  int64_t hidden;
  int64_t group;  // rows: 1, or the heads of a token
  int64_t x_stride;
  float eps;
  bool zero_centred;  // the factor is weight + 1, and the product is rounded once
};

struct RotaryEmbedding {
  void* q;                   // [num_tokens, num_heads, head_dim], tokens q_stride apart
  void* k;                   // [num_tokens, num_kv_heads, head_dim], tokens k_stride apart
  const int32_t* positions;  // [num_tokens]
  const float* cos;          // [max_positions, head_dim / 2]
  const float* sin;
  int64_t num_tokens;
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t q_stride;
  int64_t k_stride;
};

struct GatedAct {
  const void* gate_up;  // [num_rows, 2 * width], rows gate_up_stride apart
  void* out;            // [num_rows, width] contiguous
  int64_t num_rows;
  int64_t width;
  int64_t gate_up_stride;
};

struct KvCacheWrite {
  const void* k;  // [num_tokens, num_kv_heads, head_dim], tokens k_stride apart
  const void* v;
  void* k_cache;  // [num_blocks, num_kv_heads] of blocks as kv_layout.h has them
  void* v_cache;
  const int64_t* slots;  // [num_tokens]
  int64_t num_tokens;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t block_size;
  int64_t k_stride;
  int64_t v_stride;
};

struct PagedAttention {
  const void* q;        // [num_tokens, num_heads, head_dim], tokens q_stride apart
  const void* k_cache;  // [num_blocks, num_kv_heads] of blocks as kv_layout.h has them
  const void* v_cache;
  const int32_t* block_tables;  // [num_seqs, table_stride]
  const int32_t* query_starts;  // [num_seqs + 1]
  const int32_t* context_lens;  // [num_seqs]
  const int32_t* attend_to;     // [num_tokens]: the end of what each sees; null: its own position
  void* out;                    // [num_tokens, num_heads, head_dim] contiguous
  int64_t num_seqs;
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t block_size;
  int64_t q_stride;
  int64_t table_stride;
  int64_t window;  // positions that a token sees up to and with its own; 0: all
  float scale;

  // The first position that the token at `position` sees.
  [[gnu::always_inline]] int64_t first_seen(int64_t position) const {
    return window > 0 && position >= window ? position + 1 - window : 0;
  }
  [[gnu::always_inline]] int64_t group() const { return num_heads / num_kv_heads; }
};

// Query rows (tokens times heads of a group) that share one pass over the keys; more only if a
// group alone has more. How rows are cut into tiles changes no result: a row's sums depend on its
// own position alone (attention_tile.cpp).
inline constexpr int64_t kAttentionTileRows = 96;

// Keys that are weighed together, from a multiple of this position on.
inline constexpr int64_t kAttentionKeyTile = 256;

// Some consecutive query tokens of one sequence, with all query heads that share one KV head.
struct AttentionTile {
  const int32_t* block_table;
  int64_t first_token;     // row of q and out
  int64_t first_position;  // of that token in its sequence
  int64_t num_tokens;
  int64_t kv_head;
  int64_t begin;  // positions that any of the tokens sees
  int64_t end;

  [[gnu::always_inline]] int64_t num_key_tiles() const {
    return (end + kAttentionKeyTile - 1) / kAttentionKeyTile - begin / kAttentionKeyTile;
  }
};

struct GatherRows {
  const void* x;        // [any, width], rows x_stride apart
  const int64_t* rows;  // [num_rows]
  void* out;            // [num_rows, width] contiguous
  int64_t num_rows;
  int64_t width;
  int64_t x_stride;
};

struct Sample {
  const float* logits;  // [num_rows, vocab], rows logits_stride apart
  const float* temperature;
  const int32_t* top_k;
  const float* top_p;
  const float* min_p;
  const int64_t* seed;
  const int64_t* position;
  int32_t* out;  // [num_rows]; -1 where no id has a probability
  int64_t num_rows;
  int64_t vocab;
  int64_t logits_stride;
};

struct TokenLogprobs {
  const float* logits;     // [num_rows, vocab], rows logits_stride apart
  const int32_t* targets;  // [num_rows]
  float* logprobs;         // [num_rows]
  float* sums_smaller;     // [num_rows]
  int32_t* top_ids;        // [num_rows, k]
  float* top_logprobs;     // [num_rows, k]
  int64_t num_rows;
  int64_t vocab;
  int64_t k;
  int64_t logits_stride;
};

struct SumParts {
  const void* const* parts;  // num_parts pointers to [count]
  void* out;                 // [count]; may be one of the parts
  int64_t num_parts;
  int64_t count;
};

// Sums of weights are taken per chunk of this many, so that a draw can skip whole chunks.
inline constexpr int64_t kWeightChunk = 256;

// What is compiled once per instruction set. A result is a function of its row alone within one
// instruction set; between two of them the last bit may differ.
struct Kernels {
  const char* isa;
  void (*rms_norm)(DType, const RmsNorm&);
  void (*rotary_embedding)(DType, const RotaryEmbedding&);
  void (*silu_and_mul)(DType, const GatedAct&);
  void (*gelu_tanh_and_mul)(DType, const GatedAct&);
  int64_t (*attention_scratch_floats)(const PagedAttention&);
  int64_t (*attention_part_floats)(const PagedAttention&, const AttentionTile&);
  // `next`: the tile that is likely to come then, whose first keys are fetched meanwhile; or null.
  void (*attend)(DType, const PagedAttention&, const AttentionTile&, const AttentionTile* next,
                 float* scratch);
  // The same in two steps, to the bit: the parts of each tile of keys, one behind the other, which
  // may be computed in any order; and then the result, for which the first part is overwritten.
  void (*attend_part)(DType, const PagedAttention&, const AttentionTile&, int64_t index,
                      float* part, float* scratch);
  void (*merge_parts)(DType, const PagedAttention&, const AttentionTile&, float* parts);
  // Each element's sum in float32 and in the order of the parts, rounded once.
  void (*sum_parts)(DType, const SumParts&);
  // The largest of values[0, n); NaN counts as -inf.
  float (*largest)(const float* values, int64_t n);
  // weights[i] = exp((logits[i] - top) / temperature), 0 where the logit is -inf or NaN.
  void (*weigh)(const float* logits, int64_t n, float top, float temperature, float* weights);
  // sums[c] = the sum of weights[c * kWeightChunk, (c + 1) * kWeightChunk).
  void (*sum_chunks)(const float* weights, int64_t n, float* sums);
  // A tile of a product whose weight has the dtype of the activations.
  void (*linear_float)(DType activation, const Linear&, const LinearTile&);
  // The same of quantised weights, with rows of so many bytes that quantize_rows has made.
  void (*linear_int8)(DType activation, const Linear&, const LinearTile&);
  void (*linear_blocks)(DType activation, const Linear&, const LinearTile&);
  int64_t (*quantized_row_bytes)(WeightFormat format, int64_t in_features);
  void (*quantize_rows)(DType activation, const Linear&, int64_t begin, int64_t end, uint8_t* rows);
};

// The kernels in use: the widest instruction set this processor has, unless set_isa chose another.
const Kernels& kernels();

// Returns false if `isa` was not built or this processor lacks it.
bool set_isa(const char* isa);

// The same on every instruction set.
void kv_cache_write(DType dtype, const KvCacheWrite& args);
void paged_attention(DType dtype, const PagedAttention& args);
void gather_rows(DType dtype, const GatherRows& args);
void sample(const Sample& args);
void token_logprobs(const TokenLogprobs& args);
void linear(DType activation, const Linear& args);

}  // namespace airside::cpu
