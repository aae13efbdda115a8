#include <cstddef>
#include <cstring>

#include "kernels/cpu/kernels.h"
#include "kernels/cpu/parallel.h"

namespace airside::cpu {
namespace {

// A token's heads lie side by side in its row, and block_size rows apart in its block.
void write_token(const std::byte* row, std::byte* cache, int64_t slot, int64_t head_bytes,
                 const KvCacheWrite& args) {
  const int64_t block = slot / args.block_size;
  const int64_t offset = slot % args.block_size;
  std::byte* out = cache + (block * args.num_kv_heads * args.block_size + offset) * head_bytes;
  for (int64_t head = 0; head < args.num_kv_heads; ++head) {
    std::memcpy(out + head * args.block_size * head_bytes, row + head * head_bytes, head_bytes);
  }
}

}  // namespace

void kv_cache_write(DType dtype, const KvCacheWrite& args) {
  const int64_t size = size_of(dtype);
  const int64_t head_bytes = args.head_dim * size;
  const auto* k = static_cast<const std::byte*>(args.k);
  const auto* v = static_cast<const std::byte*>(args.v);
  AIRSIDE_ISA::parallel_for(
      args.num_tokens, args.num_kv_heads * args.head_dim, [&](int64_t begin, int64_t end) {
        for (int64_t token = begin; token < end; ++token) {
          const int64_t slot = args.slots[token];
          write_token(k + token * args.k_stride * size, static_cast<std::byte*>(args.k_cache), slot,
                      head_bytes, args);
          write_token(v + token * args.v_stride * size, static_cast<std::byte*>(args.v_cache), slot,
                      head_bytes, args);
        }
      });
}

}  // namespace airside::cpu
