#include <algorithm>
#include <cstddef>
#include <stdexcept>
#include <string>
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

// Every block is free or in one table; no third, and no two of it.
class BlockCensus {
 public:
  explicit BlockCensus(const BlockManager& blocks) : blocks_(blocks), seen_(blocks.num_blocks()) {
    for (const BlockId block : blocks.free()) Count(block);
  }

  void Count(const Sequence& sequence) {
    const Sequence::Cache& cache = sequence.cache;
    for (const BlockId block : cache.blocks) Count(block);
    const auto needed = blocks_.BlocksFor(cache.num_computed + sequence.schedule.num_in_flight);
    Require(static_cast<std::size_t>(needed) == cache.blocks.size(), sequence,
            "its table is not as long as its tokens need");
  }

  void CheckComplete() const {
    Require(std::find(seen_.begin(), seen_.end(), false) == seen_.end(), "a block is lost");
  }

 private:
  void Count(BlockId block) {
    const auto index = static_cast<std::size_t>(block);
    Require(index < seen_.size(), "a block that is not of the pool");
    Require(!seen_[index], "a block has two owners");
    seen_[index] = true;
  }

  const BlockManager& blocks_;
  std::vector<bool> seen_;
};

void CheckImages(const Sequence& sequence, std::optional<TokenId> image_token_id) {
  const Sequence::Input& input = sequence.input;
  const bool expanded = sequence.ShapesKnown();
  std::int32_t last_end = 0;
  for (const Image& image : input.images) {
    Require(last_end <= image.begin && image.begin < image.end, sequence, "images out of order");
    Require(image.end <= static_cast<std::int32_t>(input.prompt.size()), sequence,
            "an image behind the prompt");
    const bool has_expansion = image.state != Image::State::kShapeUnknown && !expanded;
    Require(image.expansion.empty() != has_expansion, sequence,
            "an expansion is missing, or left over");
    if (!expanded) {
      Require(input.prompt[image.begin] == image_token_id, sequence, "an image without its mark");
    }
    last_end = image.end;
  }
  Require(expanded || sequence.ReadyLength() == 0, sequence, "ready before its length is known");
  Require(sequence.ReadyLength() <= sequence.Length(), sequence, "ready past its end");
}

void CheckProgress(const Sequence& sequence, const EngineConfig& config) {
  const Sequence::Cache& cache = sequence.cache;
  const Sequence::Schedule& schedule = sequence.schedule;
  const auto num_made = static_cast<std::int64_t>(sequence.output.tokens.size());
  Require(cache.num_computed >= 0 && schedule.num_in_flight >= 0, sequence, "less than nothing");
  Require(cache.num_computed + schedule.num_in_flight <= sequence.ReadyLength(), sequence,
          "computed past its ready length");
  Require(cache.num_computed < sequence.Length(), sequence, "computed, but not sampled");
  Require(cache.num_computed <= schedule.num_computed_max, sequence, "computed, but not counted");
  Require(num_made < sequence.generation.tokens_max, sequence, "made more than it asked for");
  Require(!sequence.ShapesKnown() || sequence.Length() < config.SequenceTokensMax(), sequence,
          "longer than the context or the pool");
  Require((num_made > 0) == sequence.output.first_token.has_value(), sequence,
          "tokens without a first");
}

void CheckQueue(const WaitingQueue& queue, std::size_t num_waiting) {
  std::int64_t num_tokens = 0;
  std::size_t num_holding = 0;
  const auto visit = [&](const WaitingQueue::Ordered& filed, bool schedulable) {
    for (Sequence* const sequence : filed) {
      Require(sequence->status() == Status::kWaiting, *sequence, "queued, but not waiting");
      Require(sequence->Schedulable() == schedulable, *sequence, "filed in the wrong place");
      Require(sequence->schedule.num_in_flight == 0, *sequence, "in flight while it waits");
      num_tokens += sequence->Length();
      if (!sequence->cache.blocks.empty()) {
        ++num_holding;
        Require(queue.holding().contains(sequence), *sequence, "holds blocks unnoticed");
      }
    }
    Require(std::is_sorted(filed.begin(), filed.end(), InOrder{}), "the queue is out of order");
  };
  visit(queue.schedulable(), true);
  visit(queue.parked(), false);
  Require(static_cast<std::size_t>(queue.size()) == num_waiting, "the queue has lost someone");
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
    Require(sequence->Schedulable(), *sequence, "running with nothing to compute");
  }
}

// The number of rows whose sequence is still live.
std::size_t CheckRows(const std::vector<Row>& rows, const EngineConfig& config) {
  std::int64_t num_tokens = 0;
  std::size_t num_live = 0;
  Require(!rows.empty(), "a step with nothing in it");
  for (const Row& row : rows) {
    Require(row.num_new > 0 && row.num_new == row.sequence->schedule.num_in_flight, *row.sequence,
            "its row and its tokens in flight differ");
    num_tokens += row.num_new;
    if (!IsFinal(row.sequence->status())) ++num_live;
  }
  Require(num_tokens <= config.max_num_batched_tokens, "a step of too many tokens");
  Require(rows.size() <= static_cast<std::size_t>(config.max_num_seqs), "a step of too many rows");
  return num_live;
}

}  // namespace

void Engine::Check() const {
  BlockCensus census(scheduler_.blocks());
  std::size_t num_waiting = 0;
  std::size_t num_running = 0;
  std::size_t num_in_flight = 0;
  std::size_t num_deadlines = 0;
  for (const auto& [id, sequence] : live_) {
    Require(sequence->request.id == id, *sequence, "known by another's id");
    Require(!IsFinal(sequence->status()), *sequence, "ended, but still here");
    CheckImages(*sequence, config_.image_token_id);
    CheckProgress(*sequence, config_);
    census.Count(*sequence);
    ++(sequence->status() == Status::kWaiting ? num_waiting : num_running);
    if (sequence->schedule.num_in_flight > 0) ++num_in_flight;
    if (sequence->request.deadline) {
      ++num_deadlines;
      Require(deadlines_.contains(sequence.get()), *sequence, "its deadline is forgotten");
    }
  }
  Require(deadlines_.size() == num_deadlines, "a deadline of nobody");
  CheckQueue(scheduler_.queue(), num_waiting);
  CheckRunning(scheduler_.running(), config_, num_running);

  if (in_flight_) {
    Require(CheckRows(in_flight_->rows, config_) == num_in_flight, "rows of nobody");
    for (const auto& sequence : in_flight_->leaving) {
      Require(IsFinal(sequence->status()), *sequence, "leaving, but not ended");
      Require(sequence->schedule.num_in_flight > 0, *sequence, "leaving, but not in flight");
      census.Count(*sequence);
    }
  } else {
    Require(num_in_flight == 0, "tokens in flight without a step");
  }
  census.CheckComplete();

  std::uint64_t num_finished = 0;
  for (const auto& [status, count] : stats_.finished) num_finished += count;
  Require(stats_.finished.size() == kFinalStatuses.size(), "a reason is missing");
  Require(num_finished + live_.size() == num_added_, "a request has no end, or two");
}

}  // namespace airside
