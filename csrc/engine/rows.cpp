// The scheduler's rows: what goes into one, once it is decided that there is one.

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>

#include "engine/scheduler.h"

namespace airside {

Row& Scheduler::AddRow(Sequence& sequence, std::int32_t num_new, Planning& planning) {
  Step& step = planning.step;
  Sequence::Schedule& schedule = sequence.schedule;
  Sequence::Output& output = sequence.output;
  const std::int32_t begin = sequence.NumPlanned();
  const bool samples = begin + num_new == sequence.VirtualLength();
  Row& row = step.rows.emplace_back();
  row.sequence = &sequence;
  row.epoch = sequence.cache.epoch;
  row.begin = begin;
  row.num_new = num_new;
  row.num_sampled = samples ? 1 : 0;
  row.first_draft = static_cast<std::int32_t>(step.drafts.size());
  row.position = sequence.NumMade() + schedule.num_pending;
  if (schedule.num_pending > 0 && samples) row.placeholder = schedule.pending_index;
  row.opens = !schedule.opened && !sequence.generation.logit_rules.Empty();

  blocks_.Allocate(BlocksMissing(sequence, num_new), sequence.cache.blocks);
  planning.tokens_left -= num_new;
  planning.prompt_tokens_left -= num_new;
  if (samples) {
    ++planning.num_sampling;
    AddDrafts(row, planning);
    schedule.pending_index = step.num_positions;
    step.num_positions += row.num_sampled;
    ++schedule.num_pending;
  }
  if (sequence.input.logprobs >= 0) AddScores(row);
  sequence.cache.num_in_flight += row.num_new;
  schedule.last_step = static_cast<std::uint64_t>(step.id);
  schedule.opened |= row.opens;
  ++schedule.num_rows;
  if (!output.first_scheduled) output.first_scheduled = planning.now;
  if (schedule.preempted_at) {
    output.preempted_s += planning.now - *std::exchange(schedule.preempted_at, std::nullopt);
  }
  Charge(sequence, row.KnownEnd());
  drafter_.Follow(sequence, std::min(row.KnownEnd(), sequence.Length()));
  prefixes_.Publish(sequence);
  return row;
}

// Drafts take what nobody else needs: neither a token nor a block of the decodes that come after,
// and no block below the watermark.
void Scheduler::AddDrafts(Row& row, Planning& planning) {
  Sequence& sequence = *row.sequence;
  if (!sequence.TakesDrafts()) return;
  Step& step = planning.step;
  step.awaited = true;
  const std::int32_t end = row.begin + row.num_new;
  auto& table = sequence.cache.blocks;
  const std::int64_t spare_blocks =
      std::max(blocks_.num_free() - config_.WatermarkBlocks() - planning.num_decodes_left, 0);
  const std::int64_t places =
      (static_cast<std::int64_t>(table.size()) + spare_blocks) * config_.block_size - end;
  const std::int32_t tokens = planning.tokens_left - planning.num_decodes_left;
  const auto room = static_cast<std::int32_t>(std::min<std::int64_t>(places, tokens));
  const StepLoad load{.num_rows = planning.num_sampling + planning.num_decodes_left,
                      .num_tokens = config_.max_num_batched_tokens - planning.tokens_left +
                                    planning.num_decodes_left};
  drafter_.Propose(sequence, room, load, step.drafts);

  const auto num_drafts = static_cast<std::int32_t>(step.drafts.size()) - row.first_draft;
  row.num_new += num_drafts;
  row.num_sampled += num_drafts;
  planning.tokens_left -= num_drafts;
  planning.prompt_tokens_left -= num_drafts;
  blocks_.Allocate(BlocksMissing(sequence, row.num_new), table);
}

// The last token of the prompt is followed by output; each position is asked for once, whatever is
// computed again.
void Scheduler::AddScores(Row& row) const {
  Sequence::Output& output = row.sequence->output;
  row.score_begin = std::max(row.begin, output.num_scores_told + output.num_scores_pending);
  const std::int32_t end = std::min(row.KnownEnd(), row.sequence->PromptLength() - 1);
  row.num_scores = std::max(end - row.score_begin, 0);
  output.num_scores_pending += row.num_scores;
}

// Each token is charged for once: neither what the cache has, nor what is computed again since
// somebody else needed the room.
void Scheduler::Charge(Sequence& sequence, std::int32_t end) {
  std::int32_t& charged = sequence.schedule.num_charged;
  if (end <= charged) return;
  shares_.Charge(*sequence.schedule.account, end - charged);
  charged = end;
}

}  // namespace airside
