#include <algorithm>
#include <vector>

#include "kernels/cpu/kernels.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/scratch.h"

namespace airside::cpu {
namespace {

std::vector<AttentionTile> make_tiles(const PagedAttention& args) {
  const int64_t tile_tokens = std::max<int64_t>(1, kAttentionTileRows / args.group());
  std::vector<AttentionTile> tiles;
  for (int64_t seq = 0; seq < args.num_seqs; ++seq) {
    const int64_t begin = args.query_starts[seq];
    const int64_t end = args.query_starts[seq + 1];
    for (int64_t token = begin; token < end; token += tile_tokens) {
      for (int64_t kv_head = 0; kv_head < args.num_kv_heads; ++kv_head) {
        tiles.push_back({.block_table = args.block_tables + seq * args.table_stride,
                         .first_token = token,
                         .first_position = args.context_lens[seq] - (end - token),
                         .num_tokens = std::min(tile_tokens, end - token),
                         .kv_head = kv_head});
      }
    }
  }
  return tiles;
}

// How many keys the tile reads, but for those of a picture that are ahead of it: an estimate.
int64_t num_keys(const PagedAttention& args, const AttentionTile& tile) {
  return tile.first_position + tile.num_tokens - args.first_seen(tile.first_position);
}

}  // namespace

void paged_attention(DType dtype, const PagedAttention& args) {
  std::vector<AttentionTile> tiles = make_tiles(args);
  int64_t pairs = 0;
  for (const AttentionTile& tile : tiles) pairs += tile.num_tokens * num_keys(args, tile);
  // The longest first, so that no thread starts a long one when the others are done.
  const auto work = [&](const AttentionTile& tile) {
    return tile.num_tokens * num_keys(args, tile);
  };
  std::stable_sort(tiles.begin(), tiles.end(), [&](const AttentionTile& a, const AttentionTile& b) {
    return work(a) > work(b);
  });

  const Kernels& isa = kernels();
  const int64_t scratch = isa.attention_scratch_floats(args);
  AIRSIDE_ISA::parallel_tasks(
      static_cast<int64_t>(tiles.size()), pairs * args.group() * args.head_dim / 4,
      [&](int64_t i) { isa.attend(dtype, args, tiles[i], scratch_floats(scratch)); });
}

}  // namespace airside::cpu
