#include "kernels/cpu/kernels.h"
#include "kernels/cpu/kv_layout.h"
#include "kernels/cpu/parallel.h"

namespace airside::cpu {
namespace {

// Bits that are moved and not computed with.
using Half = BFloat16;

// What an element costs, in the units of parallel_for: nearly all is the wait for memory, where the
// key of a token has a line for each pair. Fetching the lines ahead of their turn gains nothing.
constexpr int64_t kCostPerElement = 8;

// Elements a fixed distance apart, so that no index is computed for each.
template <typename T>
void write_key(const T* key, T* block, int64_t offset, const KvCacheWrite& args) {
  constexpr int64_t kPair = AIRSIDE_ISA::kPair<T>;
  const int64_t paired = args.head_dim / kPair * kPair;
  for (int64_t d = 0; d < paired; d += kPair) {
    T* to = block + d * args.block_size + offset * kPair;
    for (int64_t i = 0; i < kPair; ++i) to[i] = key[d + i];
  }
  if (paired < args.head_dim) block[paired * args.block_size + offset] = key[paired];
}

// Only the value's own halves of pairs are written: another thread may write the others.
template <typename T>
void write_value(const T* value, T* block, int64_t offset, const KvCacheWrite& args) {
  T* to = block + AIRSIDE_ISA::value_index<T>(offset, args.block_size, 0, args.head_dim);
  const int64_t distance = AIRSIDE_ISA::value_index<T>(offset, args.block_size, 1, args.head_dim) -
                           AIRSIDE_ISA::value_index<T>(offset, args.block_size, 0, args.head_dim);
  for (int64_t d = 0; d < args.head_dim; ++d) to[d * distance] = value[d];
}

template <typename T>
void write_token(const KvCacheWrite& args, int64_t token) {
  const int64_t block = args.slots[token] / args.block_size;
  const int64_t offset = args.slots[token] % args.block_size;
  const T* k = static_cast<const T*>(args.k) + token * args.k_stride;
  const T* v = static_cast<const T*>(args.v) + token * args.v_stride;
  for (int64_t head = 0; head < args.num_kv_heads; ++head) {
    const int64_t at = (block * args.num_kv_heads + head) * args.block_size * args.head_dim;
    write_key(k + head * args.head_dim, static_cast<T*>(args.k_cache) + at, offset, args);
    write_value(v + head * args.head_dim, static_cast<T*>(args.v_cache) + at, offset, args);
  }
}

}  // namespace

void kv_cache_write(DType dtype, const KvCacheWrite& args) {
  const int64_t cost = kCostPerElement * args.num_kv_heads * args.head_dim;
  AIRSIDE_ISA::parallel_for(args.num_tokens, cost, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      if (size_of(dtype) == sizeof(float)) {
        write_token<float>(args, token);
      } else {
        write_token<Half>(args, token);
      }
    }
  });
}

}  // namespace airside::cpu
