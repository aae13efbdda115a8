#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engine/block_key.h"
#include "engine/types.h"

namespace airside {

// The pool of KV blocks, with the prefix cache. A block is
//   live:    in at least one table, `References` says in how many; it may have a key;
//   cached:  in no table, but it has a key: its content can be shared again until it is evicted;
//   empty:   in no table, without a key.
// Cached and empty ones are free: they can be had at once. A key belongs to one block at most.
class BlockManager {
 public:
  BlockManager(int num_blocks, int block_size, bool enable_caching);

  int num_blocks() const { return static_cast<int>(blocks_.size()); }
  int block_size() const { return block_size_; }
  int num_free() const { return static_cast<int>(empty_.size()) + num_cached_; }
  int num_cached() const { return num_cached_; }
  int num_live() const { return num_blocks() - num_free(); }

  // How many blocks hold this many tokens.
  int BlocksFor(std::int64_t num_tokens) const {
    return static_cast<int>((num_tokens + block_size_ - 1) / block_size_);
  }

  bool CanAllocate(int count) const { return count <= num_free(); }

  // Appends `count` blocks to the table, empty ones first, then the cached ones that nobody has
  // used for longest, which lose their key. CanAllocate(count) must hold.
  void Allocate(int count, std::vector<BlockId>& table);

  // One reference less to each block. Those that nobody refers to any more become cached if they
  // have a key; the end of the table is evicted before its beginning, which more may share.
  void Free(std::span<const BlockId> table);

  // How many of the leading keys are those of blocks.
  int CountHits(std::span<const BlockKey> keys) const;

  // Appends the blocks of these keys, which all must be hits, with one reference more each.
  void Share(std::span<const BlockKey> keys, std::vector<BlockId>& table);

  // This live block holds, or will once the steps in flight are done, what the key says. Nothing
  // happens when another block has the key already, or the block has one, or caching is off.
  void Publish(BlockId block, BlockKey key);

  // The content of all blocks is lost: no block has a key any more.
  void ForgetContents();

  int References(BlockId block) const { return Of(block).references; }
  std::optional<BlockKey> KeyOf(BlockId block) const { return Of(block).key; }

  // Throws std::logic_error when lists, counts and keys contradict one another.
  void Check() const;

 private:
  static constexpr std::int32_t kNone = -1;

  struct Block {
    std::int32_t references = 0;
    std::optional<BlockKey> key;
    // Neighbours among the cached ones: the one unused for longer, and for less long.
    std::int32_t older = kNone;
    std::int32_t newer = kNone;
  };

  const Block& Of(BlockId block) const;
  Block& Of(BlockId block) { return const_cast<Block&>(std::as_const(*this).Of(block)); }

  void PushNewest(BlockId block);
  void Unlink(Block& block);
  BlockId EvictOldest();

  int block_size_;
  bool enable_caching_;
  std::vector<Block> blocks_;
  std::vector<BlockId> empty_;  // a stack; the lowest ids go first from a fresh pool
  std::unordered_map<BlockKey, BlockId> by_key_;
  std::int32_t oldest_ = kNone;
  std::int32_t newest_ = kNone;
  int num_cached_ = 0;
};

}  // namespace airside
