#pragma once

#include <cstdint>
#include <vector>

#include "engine/types.h"

namespace airside {

// The pool of KV blocks. A block is free, or in exactly one table.
class BlockManager {
 public:
  BlockManager(int num_blocks, int block_size);

  int num_blocks() const { return num_blocks_; }
  int num_free() const { return static_cast<int>(free_.size()); }
  int num_live() const { return num_blocks_ - num_free(); }
  const std::vector<BlockId>& free() const { return free_; }

  // How many blocks hold this many tokens.
  int BlocksFor(std::int64_t num_tokens) const {
    return static_cast<int>((num_tokens + block_size_ - 1) / block_size_);
  }

  bool CanAllocate(int count) const { return count <= num_free(); }

  // Appends `count` blocks to the table; CanAllocate(count) must hold.
  void Allocate(int count, std::vector<BlockId>& table);

  void Free(const std::vector<BlockId>& table);

 private:
  int num_blocks_;
  int block_size_;
  std::vector<BlockId> free_;  // a stack; the lowest ids go first from a fresh pool
};

}  // namespace airside
