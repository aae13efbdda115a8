#include "engine/block_manager.h"

#include <algorithm>

#include "engine/ensure.h"

namespace airside {

BlockManager::BlockManager(int num_blocks, int block_size, bool enable_caching)
    : block_size_(block_size), enable_caching_(enable_caching), blocks_(num_blocks) {
  empty_.reserve(num_blocks);
  for (int id = num_blocks - 1; id >= 0; --id) empty_.push_back(static_cast<BlockId>(id));
  if (enable_caching) by_key_.reserve(num_blocks);
}

const BlockManager::Block& BlockManager::Of(BlockId block) const {
  const auto index = static_cast<std::size_t>(block);
  Ensure(index < blocks_.size(), "a block that the pool does not have");
  return blocks_[index];
}

void BlockManager::Allocate(int count, std::vector<BlockId>& table) {
  Ensure(count >= 0 && CanAllocate(count), "more blocks than are free");
  for (int i = 0; i < count; ++i) {
    BlockId block{};
    if (empty_.empty()) {
      block = EvictOldest();
    } else {
      block = empty_.back();
      empty_.pop_back();
    }
    Of(block).references = 1;
    table.push_back(block);
  }
}

void BlockManager::Free(std::span<const BlockId> table) {
  for (auto it = table.rbegin(); it != table.rend(); ++it) {
    Block& block = Of(*it);
    Ensure(block.references > 0, "a block came back more often than it was given");
    if (--block.references > 0) continue;
    if (block.key) {
      PushNewest(*it);
    } else {
      empty_.push_back(*it);
    }
  }
}

int BlockManager::CountHits(std::span<const BlockKey> keys) const {
  const auto is_miss = [&](const BlockKey& key) { return !by_key_.contains(key); };
  return static_cast<int>(std::find_if(keys.begin(), keys.end(), is_miss) - keys.begin());
}

void BlockManager::Share(std::span<const BlockKey> keys, std::vector<BlockId>& table) {
  for (const BlockKey& key : keys) {
    const auto at = by_key_.find(key);
    Ensure(at != by_key_.end(), "a block to share that the cache does not have");
    Block& block = Of(at->second);
    if (block.references++ == 0) Unlink(block);
    table.push_back(at->second);
  }
}

void BlockManager::Publish(BlockId block, BlockKey key) {
  if (!enable_caching_) return;
  Block& published = Of(block);
  Ensure(published.references > 0, "a key for a block that nobody holds");
  if (published.key) return;
  if (by_key_.try_emplace(key, block).second) published.key = key;
}

void BlockManager::ForgetContents() {
  while (num_cached_ > 0) empty_.push_back(EvictOldest());
  for (Block& block : blocks_) block.key.reset();
  by_key_.clear();
}

void BlockManager::PushNewest(BlockId id) {
  const auto index = static_cast<std::int32_t>(id);
  Block& block = Of(id);
  block.older = newest_;
  block.newer = kNone;
  (newest_ == kNone ? oldest_ : blocks_[newest_].newer) = index;
  newest_ = index;
  ++num_cached_;
}

void BlockManager::Unlink(Block& block) {
  (block.older == kNone ? oldest_ : blocks_[block.older].newer) = block.newer;
  (block.newer == kNone ? newest_ : blocks_[block.newer].older) = block.older;
  block.older = block.newer = kNone;
  --num_cached_;
}

BlockId BlockManager::EvictOldest() {
  Ensure(oldest_ != kNone, "nothing is cached that could be evicted");
  const BlockId id{oldest_};
  Block& block = Of(id);
  Unlink(block);
  by_key_.erase(*block.key);
  block.key.reset();
  return id;
}

void BlockManager::Check() const {
  std::vector<char> is_listed(blocks_.size(), 0);
  const auto list = [&](BlockId id) {
    Ensure(Of(id).references == 0, "a free block that somebody refers to");
    Ensure(!std::exchange(is_listed[static_cast<std::size_t>(id)], 1), "a block is free twice");
  };
  for (const BlockId id : empty_) {
    list(id);
    Ensure(!Of(id).key, "an empty block with a key");
  }
  std::int32_t older = kNone;
  int num_cached = 0;
  for (std::int32_t id = oldest_; id != kNone; id = blocks_[id].newer) {
    list(BlockId{id});
    Ensure(blocks_[id].older == older, "the list of cached blocks is torn");
    Ensure(blocks_[id].key.has_value(), "a cached block without a key");
    older = id;
    ++num_cached;
  }
  Ensure(older == newest_ && num_cached == num_cached_, "cached blocks are miscounted");
  std::size_t num_keys = 0;
  for (std::size_t id = 0; id < blocks_.size(); ++id) {
    const Block& block = blocks_[id];
    Ensure(block.references > 0 || is_listed[id], "a block is lost");
    if (!block.key) continue;
    ++num_keys;
    const auto at = by_key_.find(*block.key);
    Ensure(at != by_key_.end() && at->second == BlockId(id), "a key that leads elsewhere");
  }
  Ensure(num_keys == by_key_.size(), "a key of no block");
}

}  // namespace airside
