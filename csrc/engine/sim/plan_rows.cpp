#include "engine/sim/plan_rows.h"

#include <cstddef>

#include "engine/ensure.h"

namespace airside::sim {
namespace {

// Hands out a column piece by piece.
template <typename T>
class Column {
 public:
  explicit Column(const std::vector<T>& values) : values_(values) {}

  std::span<const T> Take(std::size_t count) {
    Ensure(taken_ + count <= values_.size(), "a column is shorter than its rows");
    taken_ += count;
    return std::span(values_).subspan(taken_ - count, count);
  }
  bool AllTaken() const { return taken_ == values_.size(); }

 private:
  const std::vector<T>& values_;
  std::size_t taken_ = 0;
};

void CheckColumns(const StepPlan& plan, std::size_t num_sampling, std::size_t num_positions) {
  const auto fits = [](const auto& column, std::size_t size, bool may_be_empty) {
    return column.size() == size || (may_be_empty && column.empty());
  };
  Ensure(fits(plan.temperature, num_sampling, false) && fits(plan.top_k, num_sampling, false) &&
             fits(plan.top_p, num_sampling, false) && fits(plan.min_p, num_sampling, false) &&
             fits(plan.seed, num_sampling, false) && fits(plan.position, num_sampling, false),
         "a sampling column of another length");
  Ensure(fits(plan.forced, num_positions, true), "forced tokens of another length");
  Ensure(fits(plan.logprobs, num_sampling, true) && fits(plan.structured, num_sampling, true) &&
             fits(plan.drafts_wanted, num_sampling, true),
         "an optional sampling column of another length");
}

}  // namespace

std::vector<PlanRow> ReadRows(const StepPlan& plan) {
  const std::size_t num_rows = plan.seq_ids.size();
  Column tokens(plan.token_ids);
  Column blocks(plan.block_tables);
  Column slots(plan.state_slots);
  Column origins(plan.state_from);
  Column tails(plan.tail_ids);
  Column shifts(plan.position_shifts);
  Ensure(num_rows > 0, "a plan without rows");
  const std::size_t tail = plan.tail_ids.size() / num_rows;
  const bool has_slots = !plan.state_slots.empty();
  const bool has_shifts = !plan.position_shifts.empty();
  std::vector<PlanRow> rows;
  std::int32_t num_sampling = 0;
  std::int32_t num_positions = 0;
  for (std::size_t i = 0; i < num_rows; ++i) {
    rows.push_back({.seq_id = plan.seq_ids[i],
                    .begin = plan.num_computed.at(i),
                    .tokens = tokens.Take(plan.num_new.at(i)),
                    .blocks = blocks.Take(plan.num_blocks.at(i)),
                    .tail = tails.Take(tail),
                    .state_slot = has_slots ? slots.Take(1)[0] : -1,
                    .state_from = has_slots ? origins.Take(1)[0] : BlockId{-1},
                    .position_shift = has_shifts ? shifts.Take(1)[0] : 0,
                    .num_sampled = plan.sampled.at(i),
                    .sampling_index = num_sampling,
                    .first_position = num_positions});
    num_sampling += plan.sampled[i] > 0 ? 1 : 0;
    num_positions += plan.sampled[i];
  }
  Ensure(tokens.AllTaken() && blocks.AllTaken() && slots.AllTaken() && origins.AllTaken() &&
             tails.AllTaken() && shifts.AllTaken(),
         "a column is longer than its rows");
  CheckColumns(plan, static_cast<std::size_t>(num_sampling),
               static_cast<std::size_t>(num_positions));
  return rows;
}

}  // namespace airside::sim
