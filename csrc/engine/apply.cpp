#include <algorithm>
#include <cstddef>
#include <stdexcept>
#include <string>
#include <utility>

#include "engine/engine.h"

namespace airside {
namespace {

constexpr std::size_t kRowsAhead = 4;

// The model has taken the caches since the sequences were last looked at. Memory is slow, but
// brings several things at a time.
void FetchAhead(std::span<const Row> rows) {
  if (rows.size() > 2 * kRowsAhead) rows[2 * kRowsAhead].sequence->Prefetch();
  if (rows.size() > kRowsAhead) rows[kRowsAhead].sequence->PrefetchOutput();
}

}  // namespace

void Engine::Apply(StepId step_id, const StepResult& result, Seconds now) {
  if (in_flight_.empty() || in_flight_.front().id != step_id) {
    const bool is_newer = !in_flight_.empty() && in_flight_.back().id == step_id;
    throw std::invalid_argument("step " + std::to_string(static_cast<std::uint64_t>(step_id)) +
                                (is_newer ? " is not the oldest in flight" : " is not in flight"));
  }
  if (auto fault = FindMismatch(result, in_flight_.front(), config_))
    throw std::invalid_argument(*fault);
  AdvanceClock(now);
  ++stats_.steps;
  const Step step = std::move(in_flight_.front());
  in_flight_.pop_front();
  outbox_.BeginStep(step.num_tokens);
  ResultReader reader(result);
  for (std::span<const Row> rows(step.rows); !rows.empty(); rows = rows.subspan(1)) {
    FetchAhead(rows);
    const Row& row = rows.front();
    --row.sequence->schedule.num_rows;
    const RowResult part = reader.Next(row);
    if (!IsFinal(row.sequence->status())) ApplyRow(row, step.DraftsOf(row), part);
  }
  std::erase_if(leaving_, [](const auto& sequence) { return sequence->schedule.num_rows == 0; });
}

// One that was preempted in flight waits again. What its row has sampled counts all the same.
void Engine::ApplyRow(const Row& row, std::span<const TokenId> drafts, const RowResult& result) {
  Sequence& sequence = *row.sequence;
  const bool waits = sequence.status() == Status::kWaiting;
  if (waits) scheduler_.Withdraw(sequence);
  if (row.epoch == sequence.cache.epoch) {
    sequence.cache.num_computed += row.num_new;
    sequence.cache.num_in_flight -= row.num_new;
  }
  if (row.num_scores > 0) TakeScores(row, result);
  std::optional<Ending> ending;
  if (row.Samples()) {
    ending = TakeTokens(row, drafts, result);
  } else {
    CountComputed(row, 0);
  }
  if (waits) scheduler_.Enqueue(sequence);
  if (ending) {
    End(sequence, std::move(*ending));
  } else {
    if (config_.num_state_slots > 0) scheduler_.Publish(sequence);
    scheduler_.ParkIfIdle(sequence);
  }
}

void Engine::TakeScores(const Row& row, const RowResult& result) {
  const Sequence& sequence = *row.sequence;
  row.sequence->output.num_scores_pending -= row.num_scores;
  row.sequence->output.num_scores_told += row.num_scores;
  outbox_.AddPromptLogprobs(sequence.request.client, sequence.request.id, result.scores);
}

std::optional<Ending> Engine::TakeTokens(const Row& row, std::span<const TokenId> drafts,
                                         const RowResult& result) {
  Sequence& sequence = *row.sequence;
  --sequence.schedule.num_pending;
  std::optional<Ending> ending;
  const std::size_t num_taken = Append(sequence, result.sampled, drafts, ending);
  const auto num_drafts = static_cast<std::int32_t>(drafts.size());
  const std::int32_t num_accepted = std::max(static_cast<std::int32_t>(num_taken) - 1, 0);
  const std::int32_t num_rejected = num_drafts - num_accepted;
  stats_.draft_tokens += num_drafts;
  stats_.accepted_tokens += num_accepted;
  scheduler_.drafter().Learn(sequence, num_drafts, num_accepted);
  // Drafts have become worth it: they cannot follow the token that the step in flight samples.
  const bool must_wait = sequence.schedule.num_pending > 0 && sequence.TakesDrafts();
  if (must_wait) in_flight_.back().awaited = true;
  if (num_rejected > 0) scheduler_.RollBack(sequence, num_rejected);
  CountComputed(row, num_rejected);
  sequence.draft.proposed.assign(result.proposed.begin(), result.proposed.end());
  sequence.draft.confidences.assign(result.confidences.begin(), result.confidences.end());
  if (num_taken == 0) return ending;

  if (!sequence.output.first_token) sequence.output.first_token = now_;
  stats_.generation_tokens += static_cast<std::int64_t>(num_taken);
  const std::size_t record_bytes = result.records.size() / result.sampled.size();
  outbox_.AddTokens(sequence.request.client, sequence.request.id, result.sampled.first(num_taken),
                    result.records.first(num_taken * record_bytes));
  return ending;
}

// Appends what was sampled, up to and including the first token that differs from the draft beside
// it, or that is the end. Returns how many tokens that are.
std::size_t Engine::Append(Sequence& sequence, std::span<const TokenId> sampled,
                           std::span<const TokenId> drafts, std::optional<Ending>& ending) const {
  for (std::size_t i = 0; i < sampled.size(); ++i) {
    if (sampled[i] < 0) {
      ending = EndingWithout(sampled[i]);
      return i;
    }
    sequence.output.tokens.push_back(sampled[i]);
    ending = FindEnding(sequence, config_);
    if (ending || i >= drafts.size() || sampled[i] != drafts[i]) return i + 1;
  }
  return sampled.size();
}

void Engine::CountComputed(const Row& row, std::int32_t num_rejected) {
  Sequence& sequence = *row.sequence;
  const std::int32_t end = row.begin + row.num_new - num_rejected;
  std::int32_t& computed_max = sequence.schedule.num_computed_max;
  const std::int32_t fresh = std::clamp(computed_max, row.begin, end);
  stats_.recomputed_tokens += fresh - row.begin;
  stats_.prompt_tokens += std::max(std::min(end, sequence.PromptLength()) - fresh, 0);
  computed_max = std::max(computed_max, end);
}

}  // namespace airside
