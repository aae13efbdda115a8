#include <algorithm>
#include <vector>

#include "kernels/cpu/kernels.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/scratch.h"

namespace airside::cpu {
namespace {

// With fewer tiles than this some thread may have none while others have several, so those of few
// rows are cut along their keys.
constexpr int64_t kFewTiles = 16;
constexpr int64_t kFewRows = 24;

AttentionTile make_tile(const PagedAttention& args, int64_t seq, int64_t token,
                        int64_t num_tokens) {
  const int64_t position = args.context_lens[seq] - (args.query_starts[seq + 1] - token);
  AttentionTile tile{.block_table = args.block_tables + seq * args.table_stride,
                     .first_token = token,
                     .first_position = position,
                     .num_tokens = num_tokens,
                     .kv_head = 0,
                     .begin = args.first_seen(position),
                     .end = position + num_tokens};
  for (int64_t i = token; args.attend_to != nullptr && i < token + num_tokens; ++i) {
    tile.end = std::max<int64_t>(tile.end, args.attend_to[i]);
  }
  return tile;
}

// The query rows of a step. The list is kept by the calling thread until its next call.
std::vector<AttentionTile>& make_tiles(const PagedAttention& args) {
  thread_local std::vector<AttentionTile> tiles;
  tiles.clear();
  const int64_t tile_tokens = std::max<int64_t>(1, kAttentionTileRows / args.group());
  for (int64_t seq = 0; seq < args.num_seqs; ++seq) {
    const int64_t end = args.query_starts[seq + 1];
    for (int64_t token = args.query_starts[seq]; token < end; token += tile_tokens) {
      AttentionTile tile = make_tile(args, seq, token, std::min(tile_tokens, end - token));
      for (; tile.kv_head < args.num_kv_heads; ++tile.kv_head) tiles.push_back(tile);
    }
  }
  return tiles;
}

int64_t num_pairs(const AttentionTile& tile) { return tile.num_tokens * (tile.end - tile.begin); }

// Each tile of keys of each tile of rows by itself, then what they come to.
void attend_by_keys(DType dtype, const PagedAttention& args,
                    const std::vector<AttentionTile>& tiles, int64_t cost) {
  struct Piece {
    const AttentionTile* tile;
    int64_t key_tile;
    int64_t part;  // offset of what it gives
  };
  const Kernels& isa = kernels();
  thread_local std::vector<Piece> kept;
  std::vector<Piece>& pieces = kept;  // the caller's, also on other threads
  pieces.clear();
  int64_t part_floats = 0;
  for (const AttentionTile& tile : tiles) {
    for (int64_t i = 0; i < tile.num_key_tiles(); ++i) {
      pieces.push_back({&tile, i, part_floats});
      part_floats += isa.attention_part_floats(args, tile);
    }
  }
  float* const parts = AIRSIDE_ISA::shared_scratch(part_floats);
  const int64_t scratch = isa.attention_scratch_floats(args);
  AIRSIDE_ISA::parallel_tasks(static_cast<int64_t>(pieces.size()), cost, [&](int64_t i) {
    const Piece& piece = pieces[i];
    isa.attend_part(dtype, args, *piece.tile, piece.key_tile, parts + piece.part,
                    scratch_floats(scratch));
  });
  const int64_t cost_merge = part_floats / static_cast<int64_t>(tiles.size());
  AIRSIDE_ISA::parallel_for(static_cast<int64_t>(pieces.size()), cost_merge,
                            [&](int64_t begin, int64_t end) {
                              for (int64_t i = begin; i < end; ++i) {
                                const Piece& piece = pieces[i];
                                if (piece.key_tile != 0) continue;
                                isa.merge_parts(dtype, args, *piece.tile, parts + piece.part);
                              }
                            });
}

}  // namespace

void paged_attention(DType dtype, const PagedAttention& args) {
  std::vector<AttentionTile>& tiles = make_tiles(args);
  int64_t pairs = 0;
  int64_t rows = 0;
  int64_t key_tiles = 0;
  for (const AttentionTile& tile : tiles) {
    pairs += num_pairs(tile);
    rows = std::max(rows, tile.num_tokens * args.group());
    key_tiles += tile.num_key_tiles();
  }
  const int64_t cost = pairs * args.group() * args.head_dim / 4;
  const auto num_tiles = static_cast<int64_t>(tiles.size());
  if (num_tiles < kFewTiles && num_tiles < key_tiles && rows <= kFewRows) {
    return attend_by_keys(dtype, args, tiles, cost);
  }
  // The longest first, so that no thread starts a long one when the others are done; the heads of a
  // sequence side by side, as their blocks are.
  std::sort(tiles.begin(), tiles.end(), [&](const AttentionTile& a, const AttentionTile& b) {
    const int64_t more = num_pairs(a) - num_pairs(b);
    if (more != 0) return more > 0;
    return a.first_token != b.first_token ? a.first_token < b.first_token : a.kv_head < b.kv_head;
  });
  const Kernels& isa = kernels();
  const int64_t scratch = isa.attention_scratch_floats(args);
  // Small tiles are taken in runs: whoever has one knows which is the next.
  const int64_t run =
      rows > kFewRows ? 1 : std::max<int64_t>(1, num_tiles / (8 * AIRSIDE_ISA::num_threads()));
  AIRSIDE_ISA::parallel_tasks((num_tiles + run - 1) / run, cost, [&](int64_t task) {
    for (int64_t i = task * run; i < std::min((task + 1) * run, num_tiles); ++i) {
      const AttentionTile* next = i + 1 < num_tiles ? &tiles[i + 1] : nullptr;
      isa.attend(dtype, args, tiles[i], next, scratch_floats(scratch));
    }
  });
}

}  // namespace airside::cpu
