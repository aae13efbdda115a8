#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/block_manager.h"
#include "engine/config.h"
#include "engine/sequence.h"

namespace airside {

// Chooses whose blocks are taken. A block that others share stays with them, so only those that
// nobody else refers to are gained, and two victims who share one bring it together.
class Victims {
 public:
  Victims(VictimRule rule, const BlockManager& blocks)
      : rule_(rule), blocks_(blocks), num_taken_(blocks.num_blocks(), 0) {}

  // Candidates who bring at least so many blocks, none of whom could be spared. `idle` ones, which
  // can do nothing with their blocks now, go first, the last of them before the others; of
  // `others`, the rule says. Both are in order. Empty: all of them together hold too few.
  std::vector<Sequence*> Choose(std::span<Sequence* const> idle, std::span<Sequence* const> others,
                                int blocks_missing);

 private:
  int Gain(const Sequence& candidate) const;
  double CostOf(const Sequence& candidate, int blocks_missing) const;
  void Take(Sequence& victim, std::vector<Sequence*>& victims, int& blocks_missing);
  void Spare(std::vector<Sequence*>& victims, int blocks_to_spare);
  void CountTaken(const Sequence& victim, int change);

  VictimRule rule_;
  const BlockManager& blocks_;
  std::vector<std::int32_t> num_taken_;  // references of each block that the chosen give up
};

}  // namespace airside
