#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/step_plan.h"
#include "engine/types.h"

namespace airside::sim {

// One row of a plan, as spans of its columns.
struct PlanRow {
  SeqId seq_id{};
  std::int32_t begin = 0;  // num_computed
  std::span<const TokenId> tokens;
  std::span<const BlockId> blocks;
  std::span<const TokenId> tail;
  std::int32_t state_slot = -1;
  BlockId state_from{-1};
  std::int32_t position_shift = 0;
  std::int32_t num_sampled = 0;     // its last tokens
  std::int32_t sampling_index = 0;  // in the columns of rows that sample
  std::int32_t first_position = 0;  // in the columns of sampled positions

  std::int32_t end() const { return begin + static_cast<std::int32_t>(tokens.size()); }
  std::int32_t num_drafts() const { return num_sampled > 0 ? num_sampled - 1 : 0; }
  std::span<const TokenId> drafts() const { return tokens.last(num_drafts()); }
};

// Throws std::logic_error when the plan's columns do not fit one another.
std::vector<PlanRow> ReadRows(const StepPlan& plan);

}  // namespace airside::sim
