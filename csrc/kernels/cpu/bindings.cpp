// What ops.py calls: checks, then the kernel, now or in a program that is being recorded. No
// arithmetic here.

#include <tvm/ffi/tvm_ffi.h>

#include <string>

#include "kernels/cpu/check.h"
#include "kernels/cpu/kernels.h"
#include "kernels/cpu/program.h"

namespace airside::cpu {
namespace {

using tvm::ffi::TensorView;

// Of a program that is being recorded the values are not there yet: those of a step are checked
// where they are made.
template <typename T>
void expect_values(ArgName name, const T* values, int64_t count, int64_t limit) {
  for (int64_t i = 0; recording() == nullptr && i < count; ++i) {
    expect_in(name, values[i], 0, limit);
  }
}

// `group`: rows of x that are contiguous.
void norm(const char* op, TensorView x, int64_t group, const TensorView* residual,
          TensorView weight, double eps, bool zero_centred, TensorView out) {
  const DType dtype = activation_dtype({op, "x"}, x);
  const int64_t hidden = weight.size(0);
  if (residual != nullptr) expect({op, "residual"}, *residual, x.dtype(), {x.size(0), hidden});
  expect({op, "weight"}, weight, x.dtype(), {hidden});
  submit(op, kernels().rms_norm, dtype,
         {.x = data(x),
          .residual = residual == nullptr ? nullptr : data(*residual),
          .weight = data(weight),
          .out = data(out),
          .num_rows = x.size(0) * group,
          .hidden = hidden,
          .group = group,
          .x_stride = x.stride(0),
          .eps = static_cast<float>(eps),
          .zero_centred = zero_centred},
         &RmsNorm::num_rows);
}

void norm_rows(const char* op, TensorView x, const TensorView* residual, TensorView weight,
               double eps, bool zero_centred, TensorView out) {
  expect_rank({op, "x"}, x, 2);
  activation_dtype({op, "x"}, x);
  expect({op, "x"}, x, x.dtype(), {x.size(0), x.size(1)}, Layout::kRows);
  expect({op, "weight"}, weight, x.dtype(), {x.size(1)});
  expect({op, "out"}, out, x.dtype(), {x.size(0), x.size(1)});
  norm(op, x, 1, residual, weight, eps, zero_centred, out);
}

void rms_norm_bound(TensorView x, TensorView weight, double eps, bool zero_centred,
                    TensorView out) {
  norm_rows("rms_norm", x, nullptr, weight, eps, zero_centred, out);
}

void head_rms_norm_bound(TensorView x, TensorView weight, double eps, bool zero_centred,
                         TensorView out) {
  const char* op = "head_rms_norm";
  expect_rank({op, "x"}, x, 3);
  activation_dtype({op, "x"}, x);
  expect({op, "x"}, x, x.dtype(), {x.size(0), x.size(1), x.size(2)}, Layout::kRows);
  expect({op, "weight"}, weight, x.dtype(), {x.size(2)});
  expect({op, "out"}, out, x.dtype(), {x.size(0), x.size(1), x.size(2)});
  norm(op, x, x.size(1), nullptr, weight, eps, zero_centred, out);
}

void add_rms_norm_bound(TensorView x, TensorView residual, TensorView weight, double eps,
                        bool zero_centred, TensorView out) {
  norm_rows("add_rms_norm", x, &residual, weight, eps, zero_centred, out);
}

void rotary_embedding_bound(TensorView q, TensorView k, TensorView positions, TensorView cos,
                            TensorView sin) {
  const char* op = "rotary_embedding";
  expect_rank({op, "q"}, q, 3);
  expect_rank({op, "k"}, k, 3);
  expect_rank({op, "cos"}, cos, 2);
  const int64_t num_tokens = q.size(0);
  const int64_t head_dim = q.size(2);
  const DType dtype = activation_dtype({op, "q"}, q);
  expect({op, "q"}, q, q.dtype(), {num_tokens, q.size(1), cos.size(1) * 2}, Layout::kRows);
  expect({op, "k"}, k, q.dtype(), {num_tokens, k.size(1), head_dim}, Layout::kRows);
  expect({op, "positions"}, positions, kInt32, {num_tokens});
  expect({op, "cos"}, cos, kFloat32, {cos.size(0), head_dim / 2});
  expect({op, "sin"}, sin, kFloat32, {cos.size(0), head_dim / 2});
  expect_values({op, "a position"}, data<const int32_t>(positions), num_tokens, cos.size(0));
  submit(op, kernels().rotary_embedding, dtype,
         {.q = data(q),
          .k = data(k),
          .positions = data<const int32_t>(positions),
          .cos = data<const float>(cos),
          .sin = data<const float>(sin),
          .num_tokens = num_tokens,
          .num_heads = q.size(1),
          .num_kv_heads = k.size(1),
          .head_dim = head_dim,
          .q_stride = q.stride(0),
          .k_stride = k.stride(0)},
         &RotaryEmbedding::num_tokens);
}

void kv_cache_write_bound(TensorView k, TensorView v, TensorView k_cache, TensorView v_cache,
                          TensorView slots) {
  const char* op = "kv_cache_write";
  expect_rank({op, "k"}, k, 3);
  expect_rank({op, "k_cache"}, k_cache, 4);
  const int64_t num_tokens = k.size(0);
  const int64_t num_kv_heads = k.size(1);
  const int64_t head_dim = k.size(2);
  const int64_t num_blocks = k_cache.size(0);
  const int64_t block_size = k_cache.size(2);
  const DType dtype = activation_dtype({op, "k"}, k);
  expect({op, "k"}, k, k.dtype(), {num_tokens, num_kv_heads, head_dim}, Layout::kRows);
  expect({op, "v"}, v, k.dtype(), {num_tokens, num_kv_heads, head_dim}, Layout::kRows);
  expect({op, "k_cache"}, k_cache, k.dtype(), {num_blocks, num_kv_heads, block_size, head_dim});
  expect({op, "v_cache"}, v_cache, k.dtype(), {num_blocks, num_kv_heads, block_size, head_dim});
  expect({op, "slots"}, slots, kInt64, {num_tokens});
  expect_values({op, "a slot"}, data<const int64_t>(slots), num_tokens, num_blocks * block_size);
  submit(op, kv_cache_write, dtype,
         {.k = data(k),
          .v = data(v),
          .k_cache = data(k_cache),
          .v_cache = data(v_cache),
          .slots = data<const int64_t>(slots),
          .num_tokens = num_tokens,
          .num_kv_heads = num_kv_heads,
          .head_dim = head_dim,
          .block_size = block_size,
          .k_stride = k.stride(0),
          .v_stride = v.stride(0)},
         &KvCacheWrite::num_tokens);
}

// The values that decide which memory a row reads.
void check_sequences(const PagedAttention& args, int64_t num_tokens, int64_t num_blocks,
                     int64_t max_blocks) {
  const char* op = "paged_attention";
  expect_in({op, "query_starts[0]"}, args.query_starts[0], 0, 1);
  expect_in({op, "the last of query_starts"}, args.query_starts[args.num_seqs], num_tokens,
            num_tokens + 1);
  for (int64_t seq = 0; seq < args.num_seqs; ++seq) {
    const int64_t begin = args.query_starts[seq];
    const int64_t end = args.query_starts[seq + 1];
    const int64_t context = args.context_lens[seq];
    expect_in({op, "a query start"}, end, begin, num_tokens + 1);
    if (begin == end) continue;
    expect_in({op, "a context length"}, context, end - begin, max_blocks * args.block_size + 1);
    const int32_t* table = args.block_tables + seq * args.table_stride;
    for (int64_t i = 0; i * args.block_size < context; ++i)
      expect_in({op, "a block id"}, table[i], 0, num_blocks);
    for (int64_t token = begin; args.attend_to != nullptr && token < end; ++token)
      expect_in({op, "an entry of attend_to"}, args.attend_to[token], context - (end - token) + 1,
                context + 1);
  }
}

void paged_attention_bound(TensorView q, TensorView k_cache, TensorView v_cache,
                           TensorView block_tables, TensorView query_starts,
                           TensorView context_lens, double scale, int64_t window,
                           tvm::ffi::Optional<TensorView> attend_to, TensorView out) {
  const char* op = "paged_attention";
  expect_rank({op, "q"}, q, 3);
  expect_rank({op, "k_cache"}, k_cache, 4);
  expect_rank({op, "block_tables"}, block_tables, 2);
  const int64_t num_tokens = q.size(0);
  const int64_t num_heads = q.size(1);
  const int64_t head_dim = q.size(2);
  const int64_t num_blocks = k_cache.size(0);
  const int64_t num_kv_heads = k_cache.size(1);
  const int64_t block_size = k_cache.size(2);
  const int64_t num_seqs = block_tables.size(0);
  const DType dtype = activation_dtype({op, "q"}, q);
  expect({op, "q"}, q, q.dtype(), {num_tokens, num_heads, head_dim}, Layout::kRows);
  expect({op, "k_cache"}, k_cache, q.dtype(), {num_blocks, num_kv_heads, block_size, head_dim});
  expect({op, "v_cache"}, v_cache, q.dtype(), {num_blocks, num_kv_heads, block_size, head_dim});
  expect({op, "block_tables"}, block_tables, kInt32, {num_seqs, block_tables.size(1)},
         Layout::kRows);
  expect({op, "query_starts"}, query_starts, kInt32, {num_seqs + 1});
  expect({op, "context_lens"}, context_lens, kInt32, {num_seqs});
  if (attend_to) expect({op, "attend_to"}, *attend_to, kInt32, {num_tokens});
  expect_in({op, "window"}, window, 0, int64_t{1} << 31);
  expect({op, "out"}, out, q.dtype(), {num_tokens, num_heads, head_dim});
  if (num_kv_heads == 0 || block_size == 0 || num_heads % num_kv_heads != 0) {
    TVM_FFI_THROW(ValueError) << op << ": " << num_heads << " query heads cannot share "
                              << num_kv_heads << " KV heads in blocks of " << block_size;
  }
  const PagedAttention args{.q = data(q),
                            .k_cache = data(k_cache),
                            .v_cache = data(v_cache),
                            .block_tables = data<const int32_t>(block_tables),
                            .query_starts = data<const int32_t>(query_starts),
                            .context_lens = data<const int32_t>(context_lens),
                            .attend_to = attend_to ? data<const int32_t>(*attend_to) : nullptr,
                            .out = data(out),
                            .num_seqs = num_seqs,
                            .num_heads = num_heads,
                            .num_kv_heads = num_kv_heads,
                            .head_dim = head_dim,
                            .block_size = block_size,
                            .q_stride = q.stride(0),
                            .table_stride = block_tables.stride(0),
                            .window = window,
                            .scale = static_cast<float>(scale)};
  if (recording() != nullptr) {
    return submit(op, paged_attention, dtype, args, &PagedAttention::num_seqs,
                  {&StepSize::num_seqs, 1});
  }
  check_sequences(args, num_tokens, num_blocks, block_tables.size(1));
  paged_attention(dtype, args);
}

void gated_act(const char* op, void (*act)(DType, const GatedAct&), TensorView gate_up,
               TensorView out) {
  expect_rank({op, "gate_up"}, gate_up, 2);
  const int64_t rows = gate_up.size(0);
  const int64_t width = gate_up.size(1) / 2;
  const DType dtype = activation_dtype({op, "gate_up"}, gate_up);
  expect({op, "gate_up"}, gate_up, gate_up.dtype(), {rows, 2 * width}, Layout::kRows);
  expect({op, "out"}, out, gate_up.dtype(), {rows, width});
  submit(op, act, dtype,
         {.gate_up = data(gate_up),
          .out = data(out),
          .num_rows = rows,
          .width = width,
          .gate_up_stride = gate_up.stride(0)},
         &GatedAct::num_rows);
}

void silu_and_mul_bound(TensorView gate_up, TensorView out) {
  gated_act("silu_and_mul", kernels().silu_and_mul, gate_up, out);
}

void gelu_tanh_and_mul_bound(TensorView gate_up, TensorView out) {
  gated_act("gelu_tanh_and_mul", kernels().gelu_tanh_and_mul, gate_up, out);
}

void gather_rows_bound(TensorView x, TensorView rows, TensorView out) {
  const char* op = "gather_rows";
  expect_rank({op, "x"}, x, 2);
  expect_rank({op, "rows"}, rows, 1);
  const int64_t count = rows.size(0);
  const DType dtype = activation_dtype({op, "x"}, x);
  expect({op, "x"}, x, x.dtype(), {x.size(0), x.size(1)}, Layout::kRows);
  expect({op, "rows"}, rows, kInt64, {count});
  expect({op, "out"}, out, x.dtype(), {count, x.size(1)});
  expect_values({op, "a row"}, data<const int64_t>(rows), count, x.size(0));
  submit(op, gather_rows, dtype,
         {.x = data(x),
          .rows = data<const int64_t>(rows),
          .out = data(out),
          .num_rows = count,
          .width = x.size(1),
          .x_stride = x.stride(0)},
         &GatherRows::num_rows);
}

void sample_bound(TensorView logits, TensorView temperature, TensorView top_k, TensorView top_p,
                  TensorView min_p, TensorView seed, TensorView position, TensorView out) {
  const char* op = "sample";
  expect_rank({op, "logits"}, logits, 2);
  const int64_t rows = logits.size(0);
  const int64_t vocab = logits.size(1);
  expect({op, "logits"}, logits, kFloat32, {rows, vocab}, Layout::kRows);
  expect_in({op, "the vocabulary's size"}, vocab, 1, int64_t{1} << 31);
  expect({op, "temperature"}, temperature, kFloat32, {rows});
  expect({op, "top_k"}, top_k, kInt32, {rows});
  expect({op, "top_p"}, top_p, kFloat32, {rows});
  expect({op, "min_p"}, min_p, kFloat32, {rows});
  expect({op, "seed"}, seed, kInt64, {rows});
  expect({op, "position"}, position, kInt64, {rows});
  expect({op, "out"}, out, kInt32, {rows});
  sample({.logits = data<const float>(logits),
          .temperature = data<const float>(temperature),
          .top_k = data<const int32_t>(top_k),
          .top_p = data<const float>(top_p),
          .min_p = data<const float>(min_p),
          .seed = data<const int64_t>(seed),
          .position = data<const int64_t>(position),
          .out = data<int32_t>(out),
          .num_rows = rows,
          .vocab = vocab,
          .logits_stride = logits.stride(0)});
}

void token_logprobs_bound(TensorView logits, TensorView targets, TensorView logprobs,
                          TensorView sums_smaller, TensorView top_ids, TensorView top_logprobs) {
  const char* op = "token_logprobs";
  expect_rank({op, "logits"}, logits, 2);
  expect_rank({op, "top_ids"}, top_ids, 2);
  const int64_t rows = logits.size(0);
  const int64_t vocab = logits.size(1);
  const int64_t k = top_ids.size(1);
  expect({op, "logits"}, logits, kFloat32, {rows, vocab}, Layout::kRows);
  expect_in({op, "the vocabulary's size"}, vocab, 1, int64_t{1} << 31);
  expect({op, "targets"}, targets, kInt32, {rows});
  for (int64_t i = 0; i < rows; ++i) {
    expect_in({op, "a target"}, data<const int32_t>(targets)[i], 0, vocab);
  }
  expect({op, "logprobs"}, logprobs, kFloat32, {rows});
  expect({op, "sums_smaller"}, sums_smaller, kFloat32, {rows});
  expect({op, "top_ids"}, top_ids, kInt32, {rows, k});
  expect({op, "top_logprobs"}, top_logprobs, kFloat32, {rows, k});
  token_logprobs({.logits = data<const float>(logits),
                  .targets = data<const int32_t>(targets),
                  .logprobs = data<float>(logprobs),
                  .sums_smaller = data<float>(sums_smaller),
                  .top_ids = data<int32_t>(top_ids),
                  .top_logprobs = data<float>(top_logprobs),
                  .num_rows = rows,
                  .vocab = vocab,
                  .k = k,
                  .logits_stride = logits.stride(0)});
}

std::string isa_bound() { return kernels().isa; }

bool set_isa_bound(const std::string& isa) { return set_isa(isa.c_str()); }

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(rms_norm, rms_norm_bound);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(head_rms_norm, head_rms_norm_bound);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(add_rms_norm, add_rms_norm_bound);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(rotary_embedding, rotary_embedding_bound);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(kv_cache_write, kv_cache_write_bound);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(paged_attention, paged_attention_bound);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(silu_and_mul, silu_and_mul_bound);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(gelu_tanh_and_mul, gelu_tanh_and_mul_bound);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(gather_rows, gather_rows_bound);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(sample, sample_bound);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(token_logprobs, token_logprobs_bound);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(isa, isa_bound);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(set_isa, set_isa_bound);

}  // namespace airside::cpu
