#include "engine/block_manager.h"

#include "engine/ensure.h"

namespace airside {

BlockManager::BlockManager(int num_blocks, int block_size)
    : num_blocks_(num_blocks), block_size_(block_size) {
  free_.reserve(num_blocks);
  for (int id = num_blocks - 1; id >= 0; --id) free_.push_back(static_cast<BlockId>(id));
}

void BlockManager::Allocate(int count, std::vector<BlockId>& table) {
  Ensure(count >= 0 && CanAllocate(count), "more blocks than are free");
  table.insert(table.end(), free_.rbegin(), free_.rbegin() + count);
  free_.resize(free_.size() - count);
}

void BlockManager::Free(const std::vector<BlockId>& table) {
  free_.insert(free_.end(), table.rbegin(), table.rend());
  Ensure(num_free() <= num_blocks_, "more blocks came back than there are");
}

}  // namespace airside
