#include "engine/scheduler.h"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <span>
#include <utility>

#include "engine/ensure.h"

namespace airside {
namespace {

bool InStep(const Sequence& sequence, const Step& step) {
  return sequence.schedule.last_step == static_cast<std::uint64_t>(step.id);
}

}  // namespace

Scheduler::Scheduler(const EngineConfig& config)
    : config_(config),
      blocks_(config.num_blocks, config.block_size, config.enable_prefix_caching),
      slots_(config.num_state_slots),
      prefixes_(config_, blocks_),
      drafter_(config_),
      victims_(config.victim_rule, blocks_),
      queue_(shares_) {}

bool Scheduler::HasWork() const {
  const auto can_move = [](const Sequence* sequence) { return sequence->Schedulable(); };
  if (std::any_of(running_.begin(), running_.end(), can_move)) return true;
  return static_cast<int>(running_.size()) < config_.max_num_seqs &&
         queue_.Front(config_.strict_fifo) != nullptr;
}

bool Scheduler::Finds(Sequence& sequence, std::int32_t num_tokens) {
  if (!sequence.cache.blocks.empty() || !sequence.ShapesKnown()) return false;
  const auto num_hits =
      static_cast<std::int32_t>(prefixes_.FindHits(sequence, /*as_if_encoded=*/true).size());
  return num_hits * config_.block_size >= num_tokens;
}

std::int32_t Scheduler::NumDecodes() const {
  const auto is_due = [](const Sequence* sequence) {
    return sequence->Decoding() && sequence->Schedulable();
  };
  return static_cast<std::int32_t>(std::count_if(running_.begin(), running_.end(), is_due));
}

// Why something always moves: let F be the first in order of all that can. Nobody takes blocks from
// F, whatever the victim rule, since takers only take from sequences behind them. A step in flight
// comes back, so say that none is. If nothing that runs can move, the running ones give their
// blocks back one after another, last first, and once none runs, F is at the front of the queue and
// may take blocks, and a state slot, from everyone. F fits: what does not fit the whole pool is
// never taken. What it finds in the cache is blocks that it would need anyhow.
//
// Nor does it go round in circles: blocks are taken from behind, or from an idle one, which
// computes them again only after there is news of it.
Scheduler::Selection Scheduler::Schedule(StepId id, bool is_first_in_flight, Seconds now) {
  Planning planning;
  planning.now = now;
  planning.tokens_left = config_.max_num_batched_tokens;
  planning.step.id = id;
  planning.step.rows.reserve(running_.size() + 1);
  SelectRows(planning);
  while (is_first_in_flight && planning.step.rows.empty() && !running_.empty()) {
    Preempt(*running_.back(), planning);
    SelectRows(planning);
  }
  planning.step.num_tokens = config_.max_num_batched_tokens - planning.tokens_left;
  return planning;
}

void Scheduler::SelectRows(Planning& planning) {
  if (!PromptsComeFirst()) {
    SelectDecodes(planning);
    SelectPrompts(planning);
    return;
  }
  SelectPrompts(planning);
  if (planning.step.rows.empty() || !config_.prefill_first) SelectDecodes(planning);
}

// A whole prompt, or a whole image of one, that does not fit beside the decodes would wait until
// none is left. Where that is about images, what the decodes may draft counts too.
bool Scheduler::PromptsComeFirst() {
  if (config_.prefill_first) return true;
  if (config_.enable_chunked_prefill && !config_.atomic_images) return false;
  Sequence* prompt = queue_.Front(config_.strict_fifo);
  std::int64_t beside = config_.max_num_batched_tokens;
  for (Sequence* sequence : running_) {
    if (!sequence->Schedulable()) continue;
    if (sequence->Decoding()) {
      const bool may_draft = config_.atomic_images && sequence->TakesDrafts();
      beside -= 1 + (may_draft ? std::int64_t{sequence->draft.tokens_max} : 0);
    } else if (prompt == nullptr || prompt->status() == Status::kWaiting) {
      prompt = sequence;
    }
  }
  if (prompt == nullptr) return false;
  // In chunks, text goes on as soon as a token is left for it.
  if (config_.enable_chunked_prefill) beside = std::max<std::int64_t>(beside, 1);
  return NextChunk(*prompt, FirstToCompute(*prompt), beside) == 0;
}

void Scheduler::SelectDecodes(Planning& planning) {
  const auto is_due = [&](const Sequence& sequence) {
    return sequence.Decoding() && sequence.Schedulable() && !InStep(sequence, planning.step);
  };
  planning.num_decodes_left = static_cast<std::int32_t>(
      std::count_if(running_.begin(), running_.end(),
                    [&](const Sequence* sequence) { return is_due(*sequence); }));
  // The list can only shrink behind i, as rows take blocks from sequences behind them.
  for (std::size_t i = 0; i < running_.size() && planning.tokens_left > 0; ++i) {
    if (!is_due(*running_[i])) continue;
    --planning.num_decodes_left;
    TryRow(*running_[i], 1, planning);
  }
  planning.num_decodes_left = 0;
}

void Scheduler::SelectPrompts(Planning& planning) {
  planning.prompt_tokens_left = PromptTokens(planning);
  for (std::size_t i = 0; i < running_.size(); ++i) {
    Sequence& sequence = *running_[i];
    if (InStep(sequence, planning.step) || sequence.Decoding() || !sequence.Schedulable()) continue;
    const std::int32_t num_new =
        NextChunk(sequence, sequence.NumPlanned(), planning.prompt_tokens_left);
    if (num_new == 0) return;
    TryRow(sequence, num_new, planning);
  }
  AdmitPrompts(planning);
}

void Scheduler::AdmitPrompts(Planning& planning) {
  // What somebody that runs could not get, no newcomer gets.
  if (planning.short_of_blocks && !planning.step.rows.empty()) return;
  while (planning.prompt_tokens_left > 0 &&
         static_cast<int>(running_.size()) < config_.max_num_seqs) {
    Sequence* const sequence = queue_.Front(config_.strict_fifo);
    if (sequence == nullptr || !Admit(*sequence, planning)) return;
  }
}

// Lets the front of the queue run, if there is room for its next chunk.
bool Scheduler::Admit(Sequence& sequence, Planning& planning) {
  const auto hits = prefixes_.FindHits(sequence);
  const auto num_hits = static_cast<std::int32_t>(hits.size());
  const std::int32_t hit_tokens = num_hits * config_.block_size;
  if (!sequence.cache.blocks.empty() && hit_tokens > sequence.NumPlanned()) TradeIn(sequence);
  const bool starts = sequence.cache.blocks.empty();
  const std::int32_t begin = starts ? hit_tokens : sequence.NumPlanned();
  const std::int32_t num_new = NextChunk(sequence, begin, planning.prompt_tokens_left);
  if (num_new == 0) return false;
  const auto lacks_slot = [&] {
    return starts && slots_.num_slots() > 0 && slots_.num_free() == 0;
  };
  if (lacks_slot() && FindSlotHolder(sequence, planning) == nullptr) return false;

  // Shared first, so that nobody takes what was found for what is still missing.
  std::vector<BlockId> shared;
  if (starts) blocks_.Share(hits, shared);
  const auto held = static_cast<int>(starts ? shared.size() : sequence.cache.blocks.size());
  const int missing = blocks_.BlocksFor(begin + num_new) - held;
  // The front of the queue has no company that it could not send away when nothing runs.
  const int watermark = running_.empty() ? 0 : config_.WatermarkBlocks();
  if (!MakeRoom(sequence, missing + watermark, /*from_running=*/false, planning)) {
    blocks_.Free(shared);
    return false;
  }
  if (lacks_slot()) Preempt(*FindSlotHolder(sequence, planning), planning);
  Start(sequence, std::move(shared), num_new, planning);
  return true;
}

// A parked sequence gives what it has for what the cache has, which is more: others have computed
// the picture that it was waiting for. Should it not be admitted now, it can still be later.
void Scheduler::TradeIn(Sequence& sequence) {
  Withdraw(sequence);
  Release(sequence);
  Enqueue(sequence);
}

// The sequence leaves the queue, with the blocks that it shares if it has none, and gets a row.
void Scheduler::Start(Sequence& sequence, std::vector<BlockId> shared, std::int32_t num_new,
                      Planning& planning) {
  Sequence::Cache& cache = sequence.cache;
  Sequence::Output& output = sequence.output;
  queue_.Erase(sequence);
  if (!sequence.schedule.turn) sequence.schedule.turn = next_turn_++;
  BlockId state_from{-1};
  if (cache.blocks.empty()) {
    const auto num_shared = static_cast<std::int32_t>(shared.size());
    if (slots_.num_slots() > 0) cache.state_slot = slots_.Take();
    if (slots_.num_slots() > 0 && num_shared > 0) state_from = shared.back();
    cache.blocks = std::move(shared);
    cache.num_computed = num_shared * config_.block_size;
    cache.num_published = num_shared;
    if (prefixes_.LooksUp(sequence)) counts_.prefix_queries += sequence.Length();
    counts_.prefix_hits += cache.num_computed;
    // Found before anything was lost: whatever is found later, it has left there itself.
    if (output.tokens.empty() && output.num_preemptions == 0) {
      output.num_cached = std::max(output.num_cached, cache.num_computed);
    }
    std::int32_t& charged = sequence.schedule.num_charged;
    charged = std::max(charged, cache.num_computed);
  }
  sequence.schedule.lifecycle.MoveTo(Status::kRunning);
  AddToRunning(sequence);
  AddRow(sequence, num_new, planning).state_from = state_from;
}

// How many tokens prompts may have in a step whose decodes are selected: what these leave of a
// mixed step, and half of one at the least, so that many decodes do not hold prompts up for ever.
std::int32_t Scheduler::PromptTokens(const Planning& planning) const {
  if (planning.step.rows.empty() || !config_.LimitsMixedSteps()) return planning.tokens_left;
  const std::int32_t used = config_.max_num_batched_tokens - planning.tokens_left;
  const std::int32_t least = (config_.max_num_mixed_tokens + 1) / 2;
  return std::min(planning.tokens_left, std::max(config_.max_num_mixed_tokens - used, least));
}

// Where a prompt would go on if it got a row now: behind what it has, or what the cache has for it.
std::int32_t Scheduler::FirstToCompute(Sequence& sequence) {
  if (sequence.status() != Status::kWaiting) return sequence.NumPlanned();
  const auto num_hits = static_cast<std::int32_t>(prefixes_.FindHits(sequence).size());
  return std::max(num_hits * config_.block_size, sequence.NumPlanned());
}

// How many tokens the sequence would compute next, from `begin` on; 0: none with so few left in the
// step. With chunking off it is all of them, or a whole step's worth where all would not fit any
// step. It ends before an image that would be split; an image fits any step (Engine::SetShape).
std::int32_t Scheduler::NextChunk(const Sequence& sequence, std::int32_t begin,
                                  std::int64_t tokens_left) const {
  const std::int64_t most =
      config_.enable_chunked_prefill ? tokens_left : config_.max_num_batched_tokens;
  if (most <= 0) return 0;
  const std::int32_t remaining = sequence.ReadyLength() - begin;
  const auto end = begin + static_cast<std::int32_t>(std::min<std::int64_t>(remaining, most));
  const std::int32_t num_new = std::max(sequence.WholeImagesEnd(end) - begin, 0);
  return num_new <= tokens_left ? num_new : 0;
}

int Scheduler::BlocksMissing(const Sequence& sequence, std::int32_t num_new) const {
  return blocks_.BlocksFor(sequence.NumPlanned() + num_new) -
         static_cast<int>(sequence.cache.blocks.size());
}

bool Scheduler::TryRow(Sequence& sequence, std::int32_t num_new, Planning& planning) {
  const int missing = BlocksMissing(sequence, num_new);
  if (!MakeRoom(sequence, missing, /*from_running=*/true, planning)) {
    planning.short_of_blocks = true;
    return false;
  }
  AddRow(sequence, num_new, planning);
  return true;
}

// Sees to it that so many blocks are free; false, with nothing changed, where that cannot be.
// Victims are idle ones and then those behind the taker.
bool Scheduler::MakeRoom(const Sequence& taker, int blocks_wanted, bool from_running,
                         Planning& planning) {
  if (blocks_.CanAllocate(blocks_wanted)) return true;
  const auto can_spare = [&](const Sequence* other) {
    return ComesBefore(taker, *other) && !InStep(*other, planning.step);
  };
  std::vector<Sequence*> idle;
  std::vector<Sequence*> behind;
  for (Sequence* holder : queue_.holding()) {
    if (IsIdle(*holder)) {
      idle.push_back(holder);
    } else if (can_spare(holder)) {
      behind.push_back(holder);
    }
  }
  if (from_running) {
    const auto num_waiting = static_cast<std::ptrdiff_t>(behind.size());
    std::copy_if(std::upper_bound(running_.begin(), running_.end(), &taker, InOrder{}),
                 running_.end(), std::back_inserter(behind), can_spare);
    std::inplace_merge(behind.begin(), behind.begin() + num_waiting, behind.end(), InOrder{});
  }
  const auto victims = victims_.Choose(idle, behind, blocks_wanted - blocks_.num_free());
  for (Sequence* victim : victims) Preempt(*victim, planning);
  return !victims.empty();
}

// Who in the queue gives its state slot to the taker, which is at the front; null: nobody.
Sequence* Scheduler::FindSlotHolder(const Sequence& taker, const Planning& planning) const {
  const auto& holding = queue_.holding();
  const auto at = std::find_if(holding.rbegin(), holding.rend(), [&](const Sequence* holder) {
    return IsIdle(*holder) || (ComesBefore(taker, *holder) && !InStep(*holder, planning.step));
  });
  return at == holding.rend() ? nullptr : *at;
}

// Whether somebody in the queue can do nothing with its blocks now.
bool Scheduler::IsIdle(const Sequence& waiting) const {
  return !waiting.Schedulable() || queue_.Front(config_.strict_fifo) == nullptr;
}

void Scheduler::Preempt(Sequence& victim, Planning& planning) {
  const bool was_running = victim.status() == Status::kRunning;
  ++counts_.preemptions;
  ++victim.output.num_preemptions;
  victim.schedule.preempted_at = planning.now;
  Withdraw(victim);
  if (!victim.Schedulable()) victim.schedule.num_in_vain = victim.ReadyLength();
  Release(victim);
  if (was_running && config_.preemption == PreemptionPolicy::kStop) {
    victim.schedule.lifecycle.MoveTo(Status::kFinishedPreempted);
    planning.stopped.push_back(&victim);
  } else {
    if (was_running) victim.schedule.lifecycle.MoveTo(Status::kWaiting);
    Enqueue(victim);
  }
  planning.short_of_blocks |= was_running;
}

void Scheduler::Enter(Sequence& sequence) {
  sequence.schedule.account = &shares_.Enter(sequence.request.user);
  Enqueue(sequence);
}

void Scheduler::Leave(Sequence& sequence) {
  Release(sequence);
  shares_.Leave(*std::exchange(sequence.schedule.account, nullptr));
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
  if (sequence.status() != Status::kRunning) return;
  if (sequence.cache.num_in_flight > 0 || sequence.Schedulable()) return;
  RemoveFromRunning(sequence);
  sequence.schedule.lifecycle.MoveTo(Status::kWaiting);
  Enqueue(sequence);
}

void Scheduler::RollBack(Sequence& sequence, std::int32_t num_rejected) {
  Sequence::Cache& cache = sequence.cache;
  Ensure(cache.num_in_flight == 0, "a step was planned upon drafts");
  cache.num_computed -= num_rejected;
  const int kept = blocks_.BlocksFor(cache.num_computed);
  blocks_.Free(std::span(cache.blocks).subspan(kept));
  cache.blocks.resize(kept);
}

void Scheduler::StartOver(Sequence& sequence, Seconds now) {
  if (!sequence.cache.blocks.empty()) sequence.schedule.preempted_at = now;
  sequence.schedule.num_in_vain = 0;
  Release(sequence);
  if (sequence.status() == Status::kRunning) sequence.schedule.lifecycle.MoveTo(Status::kWaiting);
  Enqueue(sequence);
}

// What it leaves in its blocks can be found again until they are taken for something else.
void Scheduler::Release(Sequence& sequence) {
  prefixes_.Publish(sequence);
  blocks_.Free(sequence.cache.blocks);
  if (sequence.cache.state_slot >= 0) slots_.GiveBack(sequence.cache.state_slot);
  const std::uint64_t epoch = sequence.cache.epoch;
  sequence.cache = {.blocks = {}, .epoch = epoch + 1};
  sequence.draft.proposed.clear();
  sequence.draft.confidences.clear();
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
