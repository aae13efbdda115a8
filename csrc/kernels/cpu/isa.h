#pragma once

#include "kernels/cpu/kernels.h"

// What each file that is compiled once per instruction set defines, and the table that gathers it.
namespace airside::cpu {
namespace AIRSIDE_ISA {

void rms_norm(DType dtype, const RmsNorm& args);
void rotary_embedding(DType dtype, const RotaryEmbedding& args);
void silu_and_mul(DType dtype, const GatedAct& args);
void gelu_tanh_and_mul(DType dtype, const GatedAct& args);
int64_t attention_scratch_floats(const PagedAttention& args);
int64_t attention_part_floats(const PagedAttention& args, const AttentionTile& tile);
void attend(DType dtype, const PagedAttention& args, const AttentionTile& tile,
            const AttentionTile* next, float* scratch);
void attend_part(DType dtype, const PagedAttention& args, const AttentionTile& tile, int64_t index,
                 float* part, float* scratch);
void merge_parts(DType dtype, const PagedAttention& args, const AttentionTile& tile, float* parts);
void sum_parts(DType dtype, const SumParts& args);
float largest(const float* values, int64_t n);
void weigh(const float* logits, int64_t n, float top, float temperature, float* weights);
void sum_chunks(const float* weights, int64_t n, float* sums);
void linear_float(DType activation, const Linear& args, const LinearTile& tile);
void linear_int8(DType activation, const Linear& args, const LinearTile& tile);
void linear_blocks(DType activation, const Linear& args, const LinearTile& tile);
int64_t quantized_row_bytes(WeightFormat format, int64_t in_features);
void quantize_rows(DType activation, const Linear& args, int64_t begin, int64_t end, uint8_t* rows);

}  // namespace AIRSIDE_ISA
}  // namespace airside::cpu
