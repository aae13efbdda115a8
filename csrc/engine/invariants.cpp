#include <algorithm>
#include <cstddef>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/engine.h"

namespace airside {
namespace {

[[noreturn]] void Broken(const std::string& what) {
  throw std::logic_error("broken invariant: " + what);
}

void Require(bool holds, const char* what) {
  if (!holds) Broken(what);
}

void Require(bool holds, const Sequence& sequence, const char* what) {
  if (holds) return;
  Broken("sequence " + std::to_string(static_cast<std::uint64_t>(sequence.request.id)) + " (" +
         sequence.request.name + "), " + std::string(Name(sequence.status())) + ": " + what);
}

// Every block has as many references as tables have it, and every state slot one owner at most.
class Census {
 public:
  Census(const BlockManager& blocks, const StateSlots& slots)
      : blocks_(blocks), references_(blocks.num_blocks()), slot_taken_(slots.num_slots()) {
    for (const std::int32_t slot : slots.free()) CountSlot(slot);
  }

  void Count(const Sequence& sequence) {
    const Sequence::Cache& cache = sequence.cache;
    for (const BlockId block : cache.blocks) {
      const auto index = static_cast<std::size_t>(block);
      Require(index < references_.size(), sequence, "a block that is not of the pool");
      ++references_[index];
    }
    const auto needed = static_cast<std::size_t>(blocks_.BlocksFor(sequence.NumPlanned()));
    Require(needed == cache.blocks.size(), sequence, "its table is not as long as its tokens need");
    const bool needs_slot = !slot_taken_.empty() && !cache.blocks.empty();
    Require((cache.state_slot >= 0) == needs_slot, sequence, "a state slot is missing, or spare");
    if (needs_slot) CountSlot(cache.state_slot);
  }

  void CheckComplete() const {
    for (std::size_t index = 0; index < references_.size(); ++index) {
      Require(references_[index] == blocks_.References(BlockId{static_cast<std::int32_t>(index)}),
              "a block's references are miscounted");
    }
    Require(std::find(slot_taken_.begin(), slot_taken_.end(), false) == slot_taken_.end(),
            "a state slot is lost");
    blocks_.Check();
  }

 private:
  void CountSlot(std::int32_t slot) {
    const auto index = static_cast<std::size_t>(slot);
    Require(index < slot_taken_.size(), "a state slot that is not ours");
    Require(!slot_taken_[index], "a state slot has two owners");
    slot_taken_[index] = true;
  }

  const BlockManager& blocks_;
  std::vector<int> references_;
  std::vector<bool> slot_taken_;
};

// What the steps in flight owe to one sequence.
struct Due {
  std::int32_t rows = 0;
  std::int32_t tokens = 0;  // of rows that its cache still waits for
  std::int32_t samples = 0;
  std::int32_t scores = 0;
};
using Dues = std::unordered_map<const Sequence*, Due>;

Dues CountDues(const std::deque<Step>& steps) {
  Dues dues;
  for (const Step& step : steps) {
    for (const Row& row : step.rows) {
      Due& due = dues[row.sequence];
      ++due.rows;
      due.samples += row.Samples() ? 1 : 0;
      due.scores += row.num_scores;
      if (row.epoch == row.sequence->cache.epoch) due.tokens += row.num_new;
    }
  }
  return dues;
}

void CheckDue(const Sequence& sequence, const Dues& dues) {
  const auto at = dues.find(&sequence);
  const Due due = at == dues.end() ? Due{} : at->second;
  const Sequence::Schedule& schedule = sequence.schedule;
  Require(schedule.num_rows == due.rows, sequence, "its rows in flight are miscounted");
  Require(schedule.num_pending == due.samples, sequence, "its pending tokens are miscounted");
  Require(sequence.cache.num_in_flight == due.tokens, sequence,
          "its tokens in flight are miscounted");
  Require(sequence.output.num_scores_pending == due.scores, sequence, "its records are miscounted");
}

void CheckImages(const Sequence& sequence, const EngineConfig& config) {
  const Sequence::Input& input = sequence.input;
  const bool expanded = sequence.ShapesKnown();
  std::int32_t last_end = 0;
  for (const Image& image : input.images) {
    Require(last_end <= image.begin && image.begin < image.end, sequence, "images out of order");
    Require(image.end <= sequence.PromptLength(), sequence, "an image behind the prompt");
    const bool has_expansion = image.state != Image::State::kShapeUnknown && !expanded;
    Require(image.expansion.empty() != has_expansion, sequence,
            "an expansion is missing, or left over");
    if (!expanded) {
      Require(input.prompt[image.begin] == config.MarkId(), sequence, "an image without its mark");
    }
    last_end = image.end;
  }
  Require(expanded || sequence.ReadyLength() == 0, sequence, "ready before its length is known");
  Require(sequence.ReadyLength() <= sequence.VirtualLength(), sequence, "ready past its end");
}

void CheckProgress(const Sequence& sequence, const EngineConfig& config) {
  const Sequence::Cache& cache = sequence.cache;
  const Sequence::Schedule& schedule = sequence.schedule;
  const Sequence::Output& output = sequence.output;
  Require(cache.num_computed >= 0 && cache.num_in_flight >= 0, sequence, "less than nothing");
  Require(cache.num_computed < sequence.Length(), sequence, "computed, but not sampled");
  // Drafts in flight reach past what may be computed, and are never run ahead of.
  Require(sequence.NumPlanned() <= sequence.ReadyLength() || sequence.TakesDrafts(), sequence,
          "planned past its ready length");
  Require(sequence.NumPlanned() <= config.SequenceTokensMax(), sequence, "planned past its limit");
  Require(sequence.NumMade() < sequence.generation.tokens_max, sequence,
          "made more than it asked for");
  Require(!sequence.ShapesKnown() || sequence.Length() < config.SequenceTokensMax(), sequence,
          "longer than the context or the pool");
  Require((sequence.NumMade() > 0) == output.first_token.has_value(), sequence,
          "tokens without a first");
  Require(cache.blocks.empty() || schedule.turn, sequence, "blocks without a turn");
  Require(output.num_scores_told + output.num_scores_pending < sequence.PromptLength() ||
              sequence.input.logprobs < 0,
          sequence, "more records than its prompt has places");
  Require(schedule.num_in_vain <= sequence.ReadyLength(), sequence, "it could get further once");
  Require(!schedule.opened || !sequence.generation.logit_rules.Empty(), sequence,
          "opened without need");
  Require(sequence.draft.num_accepted <= sequence.draft.num_verified, sequence,
          "more drafts were right than there were");
}

// The blocks that it told of have its keys, or another block with the same content does.
void CheckKeys(const Sequence& sequence, const BlockManager& blocks, const EngineConfig& config) {
  const Sequence::Cache& cache = sequence.cache;
  const auto num_published = static_cast<std::size_t>(cache.num_published);
  Require(num_published <= cache.blocks.size() && num_published <= sequence.keys.size(), sequence,
          "told of blocks that it has not");
  Require(static_cast<std::int64_t>(sequence.keys.size()) * config.block_size <= sequence.Length(),
          sequence, "keys of tokens that nobody knows");
  for (std::size_t i = 0; i < num_published; ++i) {
    const auto key = blocks.KeyOf(cache.blocks[i]);
    Require(!key || *key == sequence.keys[i], sequence, "a block with somebody else's key");
  }
  for (std::size_t i = num_published; i < cache.blocks.size(); ++i) {
    Require(!blocks.KeyOf(cache.blocks[i]), sequence, "a key of a block that is not full");
  }
}

void CheckQueue(const WaitingQueue& queue, std::size_t num_waiting) {
  std::unordered_map<const FairShares::Account*, std::int32_t> num_due;  // a turn each
  std::int64_t num_tokens = 0;
  std::size_t num_holding = 0;
  std::size_t num_visited = 0;
  queue.ForEach([&](const Sequence& sequence, bool is_parked) {
    ++num_visited;
    Require(sequence.status() == Status::kWaiting, sequence, "queued, but not waiting");
    Require(sequence.Schedulable() != is_parked, sequence, "filed in the wrong place");
    Require(sequence.cache.num_in_flight == 0, sequence, "in flight while it waits");
    Require(sequence.schedule.num_pending == 0 || sequence.cache.blocks.empty(), sequence,
            "holds blocks while it waits for a token");
    num_tokens += sequence.Length();
    num_due[sequence.schedule.account] += !is_parked && !sequence.schedule.turn ? 1 : 0;
    if (sequence.cache.blocks.empty()) return;
    ++num_holding;
    Require(queue.holding().contains(const_cast<Sequence*>(&sequence)), sequence,
            "holds blocks unnoticed");
  });
  for (const auto& [account, count] : num_due) {
    Require(account->num_waiting == count, "what waits for a user is miscounted");
  }
  Require(num_visited == num_waiting, "the queue has lost someone");
  Require(static_cast<std::size_t>(queue.size()) == num_waiting, "the queue is miscounted");
  Require(queue.holding().size() == num_holding, "someone is said to hold blocks, but does not");
  Require(queue.num_tokens() == num_tokens, "the queue's tokens are miscounted");
}

void CheckRunning(const std::vector<Sequence*>& running, const EngineConfig& config,
                  std::size_t num_running) {
  Require(std::is_sorted(running.begin(), running.end(), InOrder{}), "running out of order");
  Require(running.size() == num_running, "the running list has lost someone");
  Require(running.size() <= static_cast<std::size_t>(config.max_num_seqs), "too many are running");
  for (const Sequence* sequence : running) {
    Require(sequence->status() == Status::kRunning, *sequence, "listed as running");
    Require(sequence->Schedulable() || sequence->cache.num_in_flight > 0, *sequence,
            "running with nothing to compute");
  }
}

void CheckStep(const Step& step, const EngineConfig& config) {
  std::int64_t num_tokens = 0;
  std::int64_t num_positions = 0;
  std::int64_t num_drafts = 0;
  Require(!step.rows.empty(), "a step with nothing in it");
  for (const Row& row : step.rows) {
    const Sequence& sequence = *row.sequence;
    Require(row.num_new > row.NumDrafts(), sequence, "a row of nothing but drafts");
    Require(row.first_draft == num_drafts, sequence, "drafts out of order");
    const std::int32_t end = row.KnownEnd();
    Require(sequence.WholeImagesEnd(end) == end, sequence, "a row that ends inside an image");
    num_tokens += row.num_new;
    num_positions += row.num_sampled;
    num_drafts += row.NumDrafts();
  }
  Require(num_tokens == step.num_tokens, "a step's tokens are miscounted");
  Require(num_positions == step.num_positions, "a step's positions are miscounted");
  Require(num_drafts == static_cast<std::int64_t>(step.drafts.size()), "drafts of nobody");
  Require(num_drafts == 0 || step.awaited, "drafts that nobody waits for");
  Require(num_tokens <= config.max_num_batched_tokens, "a step of too many tokens");
  Require(step.rows.size() <= static_cast<std::size_t>(config.max_num_seqs),
          "a step of too many rows");
}

}  // namespace

void Engine::Check() const {
  const Dues dues = CountDues(in_flight_);
  Census census(scheduler_.blocks(), scheduler_.slots());
  std::size_t num_waiting = 0;
  std::size_t num_running = 0;
  std::size_t num_deadlines = 0;
  for (const auto& [id, sequence] : live_) {
    Require(sequence->request.id == id, *sequence, "known by another's id");
    Require(!IsFinal(sequence->status()), *sequence, "ended, but still here");
    CheckImages(*sequence, config_);
    CheckProgress(*sequence, config_);
    CheckDue(*sequence, dues);
    CheckKeys(*sequence, scheduler_.blocks(), config_);
    census.Count(*sequence);
    ++(sequence->status() == Status::kWaiting ? num_waiting : num_running);
    if (sequence->request.deadline) {
      ++num_deadlines;
      Require(deadlines_.contains(sequence.get()), *sequence, "its deadline is forgotten");
    }
  }
  Require(deadlines_.size() == num_deadlines, "a deadline of nobody");
  CheckQueue(scheduler_.queue(), num_waiting);
  CheckRunning(scheduler_.running(), config_, num_running);
  census.CheckComplete();

  for (const auto& sequence : leaving_) {
    Require(IsFinal(sequence->status()), *sequence, "leaving, but not ended");
    Require(sequence->cache.blocks.empty(), *sequence, "leaving with blocks");
    const auto due = dues.find(sequence.get());
    Require(due != dues.end() && due->second.rows == sequence->schedule.num_rows, *sequence,
            "kept for rows that it has not");
  }
  Require(in_flight_.size() <= static_cast<std::size_t>(config_.StepsInFlightMax()),
          "too many steps at once");
  for (std::size_t i = 0; i < in_flight_.size(); ++i) {
    CheckStep(in_flight_[i], config_);
    Require(i + 1 == in_flight_.size() || !in_flight_[i].awaited,
            "a step was planned before one that is awaited");
  }

  std::uint64_t num_finished = 0;
  for (const auto& [status, count] : stats_.finished) num_finished += count;
  Require(stats_.finished.size() == kFinalStatuses.size(), "a reason is missing");
  Require(num_finished + live_.size() == num_added_, "a request has no end, or two");
}

}  // namespace airside
