#include "kernels/cpu/isa.h"

#define AIRSIDE_STRING_OF(name) #name
#define AIRSIDE_STRING(name) AIRSIDE_STRING_OF(name)

namespace airside::cpu::AIRSIDE_ISA {

extern const Kernels kTable;
const Kernels kTable = {
    .isa = AIRSIDE_STRING(AIRSIDE_ISA),
    .rms_norm = rms_norm,
    .rotary_embedding = rotary_embedding,
    .silu_and_mul = silu_and_mul,
    .gelu_tanh_and_mul = gelu_tanh_and_mul,
    .attention_scratch_floats = attention_scratch_floats,
    .attention_part_floats = attention_part_floats,
    .attend = attend,
    .attend_part = attend_part,
    .merge_parts = merge_parts,
    .sum_parts = sum_parts,
    .largest = largest,
    .weigh = weigh,
    .sum_chunks = sum_chunks,
    .linear_float = linear_float,
    .linear_int8 = linear_int8,
    .linear_blocks = linear_blocks,
    .quantized_row_bytes = quantized_row_bytes,
    .quantize_rows = quantize_rows,
};

}  // namespace airside::cpu::AIRSIDE_ISA
