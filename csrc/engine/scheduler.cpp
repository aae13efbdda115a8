#include "engine/scheduler.h"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <utility>

#include "engine/ensure.h"

namespace airside {
namespace {

bool InStep(const Sequence& sequence) { return sequence.schedule.num_in_flight > 0; }

}  // namespace

Scheduler::Scheduler(const EngineConfig& config)
    : config_(config), blocks_(config.num_blocks, config.block_size) {}

// Why something always moves: let F be the first in order of all that can. Nobody takes blocks from
// F, since takers only take from sequences behind them. If nothing that runs can move, the running
// ones give their blocks back one after another, last first, and once none runs, F is at the front
// of the queue and may take from everyone. F fits: what does not fit the whole pool is never taken.
Scheduler::Selection Scheduler::Schedule() {
  Step step;
  step.tokens_left = config_.max_num_batched_tokens;
  SelectRows(step);
  while (step.rows.empty() && !running_.empty()) {
    Preempt(*running_.back(), step);
    SelectRows(step);
  }
  return step;
}

void Scheduler::SelectRows(Step& step) {
  if (!PromptsComeFirst()) {
    SelectDecodes(step);
    SelectPrompts(step);
    return;
  }
  SelectPrompts(step);
  if (step.rows.empty() || !config_.prefill_first) SelectDecodes(step);
}

// Without chunking, a prompt that does not fit beside the decodes would wait until none is left.
bool Scheduler::PromptsComeFirst() const {
  if (config_.prefill_first) return true;
  if (config_.enable_chunked_prefill) return false;
  const Sequence* prompt = queue_.Front(config_.strict_fifo);
  std::int32_t num_decodes = 0;
  for (const Sequence* sequence : running_) {
    if (sequence->Decoding()) {
      ++num_decodes;
    } else if (prompt == nullptr || prompt->status() == Status::kWaiting) {
      prompt = sequence;
    }
  }
  return prompt != nullptr && NextChunk(*prompt, config_.max_num_batched_tokens - num_decodes) == 0;
}

void Scheduler::SelectDecodes(Step& step) {
  // The list can only shrink behind i, as rows take blocks from sequences behind them.
  for (std::size_t i = 0; i < running_.size() && step.tokens_left > 0; ++i) {
    if (running_[i]->Decoding()) TryRow(*running_[i], 1, step);
  }
}

void Scheduler::SelectPrompts(Step& step) {
  for (std::size_t i = 0; i < running_.size(); ++i) {
    Sequence& sequence = *running_[i];
    if (InStep(sequence) || sequence.Decoding()) continue;
    const std::int32_t num_new = NextChunk(sequence, step.tokens_left);
    if (num_new == 0) return;
    TryRow(sequence, num_new, step);
  }
  AdmitPrompts(step);
}

void Scheduler::AdmitPrompts(Step& step) {
  // What somebody that runs could not get, no newcomer gets.
  if (step.short_of_blocks && !step.rows.empty()) return;
  while (static_cast<int>(running_.size()) < config_.max_num_seqs) {
    Sequence* const sequence = queue_.Front(config_.strict_fifo);
    if (sequence == nullptr) return;
    const std::int32_t num_new = NextChunk(*sequence, step.tokens_left);
    if (num_new == 0) return;
    // The front of the queue has no company that it could not send away when nothing runs.
    const int watermark = running_.empty() ? 0 : config_.WatermarkBlocks();
    const int wanted = BlocksMissing(*sequence, num_new) + watermark;
    if (!MakeRoom(*sequence, wanted, /*from_running=*/false, step)) return;
    queue_.Erase(*sequence);
    sequence->schedule.lifecycle.MoveTo(Status::kRunning);
    AddToRunning(*sequence);
    AddRow(*sequence, num_new, step);
  }
}

// How many of its tokens the sequence would compute next; 0: none with so few left in the step.
// With chunking off it is all of them, or a whole step's worth where all would not fit any step.
std::int32_t Scheduler::NextChunk(const Sequence& sequence, std::int32_t tokens_left) const {
  const std::int32_t remaining = sequence.ReadyLength() - sequence.cache.num_computed;
  if (config_.enable_chunked_prefill) return std::min(remaining, tokens_left);
  const std::int32_t whole = std::min(remaining, config_.max_num_batched_tokens);
  return whole <= tokens_left ? whole : 0;
}

int Scheduler::BlocksMissing(const Sequence& sequence, std::int32_t num_new) const {
  const Sequence::Cache& cache = sequence.cache;
  return blocks_.BlocksFor(cache.num_computed + num_new) - static_cast<int>(cache.blocks.size());
}

bool Scheduler::TryRow(Sequence& sequence, std::int32_t num_new, Step& step) {
  const int missing = BlocksMissing(sequence, num_new);
  if (!MakeRoom(sequence, missing, /*from_running=*/true, step)) {
    step.short_of_blocks = true;
    return false;
  }
  AddRow(sequence, num_new, step);
  return true;
}

void Scheduler::AddRow(Sequence& sequence, std::int32_t num_new, Step& step) {
  blocks_.Allocate(BlocksMissing(sequence, num_new), sequence.cache.blocks);
  sequence.schedule.num_in_flight = num_new;
  step.tokens_left -= num_new;
  step.rows.push_back({&sequence, num_new});
}

// Sees to it that so many blocks are free; false, with nothing changed, where that cannot be.
bool Scheduler::MakeRoom(const Sequence& taker, int blocks_wanted, bool from_running, Step& step) {
  if (blocks_.CanAllocate(blocks_wanted)) return true;
  const std::vector<Sequence*> victims = FindVictims(taker, blocks_wanted, from_running);
  for (Sequence* victim : victims) Preempt(*victim, step);
  return !victims.empty();
}

// The fewest sequences that can spare the blocks: idle ones, which can do nothing with them now,
// and then those behind the taker, last first. Empty: all of them together hold too few.
std::vector<Sequence*> Scheduler::FindVictims(const Sequence& taker, int blocks_wanted,
                                              bool from_running) const {
  const bool queue_moves = queue_.Front(config_.strict_fifo) != nullptr;
  const auto is_idle = [&](const Sequence* waiting) {
    return !queue_moves || !waiting->Schedulable();
  };
  const auto can_spare = [&](const Sequence* other) {
    return ComesBefore(taker, *other) && !InStep(*other);
  };
  std::vector<Sequence*> candidates;
  const auto& holding = queue_.holding();
  std::copy_if(holding.rbegin(), holding.rend(), std::back_inserter(candidates), is_idle);
  const auto num_idle = static_cast<std::ptrdiff_t>(candidates.size());
  std::copy_if(holding.begin(), holding.end(), std::back_inserter(candidates),
               [&](const Sequence* other) { return !is_idle(other) && can_spare(other); });
  if (from_running) {
    std::copy_if(running_.begin(), running_.end(), std::back_inserter(candidates), can_spare);
  }
  std::sort(candidates.begin() + num_idle, candidates.end(),
            [](const Sequence* a, const Sequence* b) { return ComesBefore(*b, *a); });

  int blocks = blocks_.num_free();
  for (auto it = candidates.begin(); it != candidates.end(); ++it) {
    blocks += static_cast<int>((*it)->cache.blocks.size());
    if (blocks >= blocks_wanted) return {candidates.begin(), it + 1};
  }
  return {};
}

void Scheduler::Preempt(Sequence& victim, Step& step) {
  const bool was_running = victim.status() == Status::kRunning;
  ++num_preemptions_;
  ++victim.output.num_preemptions;
  Withdraw(victim);
  Release(victim);
  if (was_running && config_.preemption == PreemptionPolicy::kStop) {
    victim.schedule.lifecycle.MoveTo(Status::kFinishedPreempted);
    step.stopped.push_back(&victim);
  } else {
    if (was_running) victim.schedule.lifecycle.MoveTo(Status::kWaiting);
    Enqueue(victim);
  }
  step.short_of_blocks |= was_running;
}

void Scheduler::Enqueue(Sequence& sequence) {
  Ensure(sequence.status() == Status::kWaiting, "a sequence in the queue that does not wait");
  queue_.Insert(sequence);
}

void Scheduler::Withdraw(Sequence& sequence) {
  if (sequence.status() == Status::kWaiting) {
    queue_.Erase(sequence);
  } else {
    RemoveFromRunning(sequence);
  }
}

void Scheduler::ParkIfIdle(Sequence& sequence) {
  if (sequence.Schedulable()) return;
  RemoveFromRunning(sequence);
  sequence.schedule.lifecycle.MoveTo(Status::kWaiting);
  Enqueue(sequence);
}

void Scheduler::ForgetCaches() {
  const std::vector<Sequence*> holders(queue_.holding().begin(), queue_.holding().end());
  for (Sequence* sequence : holders) {
    queue_.Erase(*sequence);
    Release(*sequence);
    Enqueue(*sequence);
  }
  for (Sequence* sequence : std::exchange(running_, {})) {
    Release(*sequence);
    sequence->schedule.lifecycle.MoveTo(Status::kWaiting);
    Enqueue(*sequence);
  }
}

void Scheduler::Release(Sequence& sequence) {
  blocks_.Free(std::exchange(sequence.cache, {}).blocks);
}

void Scheduler::AddToRunning(Sequence& sequence) {
  running_.insert(std::upper_bound(running_.begin(), running_.end(), &sequence, InOrder{}),
                  &sequence);
}

void Scheduler::RemoveFromRunning(const Sequence& sequence) {
  const auto at = std::find(running_.begin(), running_.end(), &sequence);
  Ensure(at != running_.end(), "a running sequence that is not in the list");
  running_.erase(at);
}

}  // namespace airside
