#include "engine/engine.h"

#include <algorithm>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "engine/ensure.h"

namespace airside {
namespace {

const EngineConfig& Validated(const EngineConfig& config) {
  Validate(config);
  return config;
}

}  // namespace

bool Engine::ByDeadline::operator()(const Sequence* a, const Sequence* b) const {
  return std::tie(*a->request.deadline, a->request.serial) <
         std::tie(*b->request.deadline, b->request.serial);
}

Engine::Engine(const EngineConfig& config) : config_(Validated(config)), scheduler_(config) {
  for (const Status status : kFinalStatuses) stats_.finished[status] = 0;
}

std::optional<Rejection> Engine::Add(Request request, Seconds now) {
  AdvanceClock(now);
  if (live_.contains(request.seq_id)) {
    return Rejection{RejectionCode::kDuplicateId,
                     "sequence " + std::to_string(static_cast<std::uint64_t>(request.seq_id)) +
                         " has not ended yet"};
  }
  if (auto fault = FindFault(request, config_)) return fault;
  if (auto full = FindQueueFull(request)) return full;

  const SeqId id = request.seq_id;
  const auto at = live_.emplace(
      id, std::make_unique<Sequence>(MakeSequence(std::move(request), num_added_++, config_)));
  Sequence& sequence = *at.first->second;
  if (sequence.request.deadline) deadlines_.insert(&sequence);
  scheduler_.Enter(sequence);
  return std::nullopt;
}

std::optional<Rejection> Engine::FindQueueFull(const Request& request) const {
  const WaitingQueue& queue = scheduler_.queue();
  if (queue.size() >= config_.max_queued_requests) {
    return Rejection{RejectionCode::kQueueFull, std::to_string(queue.size()) +
                                                    " requests are waiting, of at most " +
                                                    std::to_string(config_.max_queued_requests)};
  }
  // An empty queue takes any one prompt that fits the model, however long.
  const auto num_tokens = static_cast<std::int64_t>(request.token_ids.size());
  if (queue.size() > 0 && queue.num_tokens() + num_tokens > config_.max_queued_tokens) {
    return Rejection{RejectionCode::kQueueFull,
                     std::to_string(queue.num_tokens()) + " tokens are waiting, and " +
                         std::to_string(num_tokens) + " more would pass the limit of " +
                         std::to_string(config_.max_queued_tokens)};
  }
  return std::nullopt;
}

bool Engine::SetShape(SeqId seq_id, int image_index, ImageShape shape) {
  if (auto fault = airside::FindFault(shape, config_)) throw std::invalid_argument(*fault);
  Sequence* const sequence = FindImage(seq_id, image_index);
  if (sequence == nullptr) return false;
  Image& image = sequence->input.images[image_index];
  if (image.state != Image::State::kShapeUnknown) return false;

  scheduler_.Withdraw(*sequence);
  image.TakeShape(std::move(shape));
  if (sequence->ShapesKnown()) ExpandPrompt(sequence->input, config_.image_token_id);
  scheduler_.Enqueue(*sequence);

  if (sequence->ShapesKnown()) {
    const auto num_tokens = static_cast<std::int64_t>(sequence->input.prompt.size());
    if (auto misfit = FindMisfit(num_tokens, config_)) {
      End(*sequence, {Status::kFinishedIgnored, std::move(misfit->detail)});
    } else if (const std::int32_t longest = sequence->LongestWholeImage();
               longest > config_.max_num_batched_tokens) {
      End(*sequence,
          {Status::kFinishedIgnored, "an image takes " + std::to_string(longest) +
                                         " tokens in one step, but a step has " +
                                         std::to_string(config_.max_num_batched_tokens)});
    }
  }
  return true;
}

bool Engine::SetReady(SeqId seq_id, int image_index) {
  Sequence* const sequence = FindImage(seq_id, image_index);
  if (sequence == nullptr) return false;
  Image& image = sequence->input.images[image_index];
  if (image.state == Image::State::kShapeUnknown) {
    throw std::invalid_argument("an image's pixels came before its shape");
  }
  if (image.state == Image::State::kReady) return false;

  const bool waits = sequence->status() == Status::kWaiting;
  if (waits) scheduler_.Withdraw(*sequence);
  image.state = Image::State::kReady;
  AwaitEncoder(*sequence, image_index);
  if (waits) scheduler_.Enqueue(*sequence);
  const auto& images = sequence->input.images;
  if (std::all_of(images.begin(), images.end(),
                  [](const Image& other) { return other.state == Image::State::kReady; })) {
    seeing_.push_back(seq_id);
  }
  return true;
}

bool Engine::SetGrammarReady(SeqId seq_id) {
  Sequence* const sequence = Find(seq_id);
  if (sequence == nullptr || !sequence->structured.wanted) return false;
  if (sequence->structured.grammar_ready) return false;
  const bool waits = sequence->status() == Status::kWaiting;
  if (waits) scheduler_.Withdraw(*sequence);
  sequence->structured.grammar_ready = true;
  if (waits) scheduler_.Enqueue(*sequence);
  return true;
}

bool Engine::FailGrammar(SeqId seq_id, std::string detail) {
  return EndIfLive(seq_id, Status::kFinishedSoFailed, std::move(detail));
}

bool Engine::Stop(SeqId seq_id, std::int64_t num_tokens, std::string detail) {
  Sequence* const sequence = Find(seq_id);
  if (sequence == nullptr) return false;
  const auto counted = std::clamp<std::int64_t>(num_tokens, 0, sequence->NumMade());
  scheduler_.Withdraw(*sequence);
  sequence->schedule.lifecycle.MoveTo(Status::kFinishedStopped);
  Dismiss(*sequence, counted, std::move(detail));
  return true;
}

bool Engine::Abort(SeqId seq_id, std::string cause) {
  return EndIfLive(seq_id, Status::kFinishedAborted, std::move(cause));
}

bool Engine::FailVision(SeqId seq_id, std::string detail) {
  return EndIfLive(seq_id, Status::kFinishedVeFailed, std::move(detail));
}

bool Engine::MayPlan() const {
  if (static_cast<int>(in_flight_.size()) >= config_.StepsInFlightMax()) return false;
  return in_flight_.empty() || !in_flight_.back().awaited;
}

std::optional<StepPlan> Engine::Schedule(Seconds now) {
  AdvanceClock(now);
  EndOverdue();
  if (!MayPlan()) return std::nullopt;
  const std::int32_t num_decodes = images_.waiting().empty() ? 0 : scheduler_.NumDecodes();
  const auto candidates = TakeReadable(num_decodes);
  LetRead(candidates);
  Scheduler::Selection selection =
      scheduler_.Schedule(StepId{num_scheduled_ + 1}, in_flight_.empty(), now_);
  HoldBackUnread(candidates);
  for (Sequence* sequence : selection.stopped) {
    Dismiss(*sequence, sequence->NumMade(),
            "preempted: sequences ahead of it needed its KV blocks");
  }
  if (selection.step.rows.empty()) return std::nullopt;
  if (num_decodes > 0) selection.step.ahead = EncodeAhead(num_decodes);
  ++num_scheduled_;
  in_flight_.push_back(std::move(selection.step));
  return MakeStepPlan(in_flight_.back(), config_, scheduler_.drafter(), std::exchange(closed_, {}));
}

void Engine::FailStep(Seconds now) {
  AdvanceClock(now);
  in_flight_.clear();
  leaving_.clear();
  closed_.clear();
  images_.Clear();
  for (Sequence* sequence : InOrderOfAdding()) {
    scheduler_.Withdraw(*sequence);
    sequence->schedule.num_rows = 0;
    sequence->schedule.num_pending = 0;
    sequence->schedule.opened = false;
    sequence->structured.grammar_ready = false;
    sequence->output.num_scores_pending = 0;
    for (std::size_t i = 0; i < sequence->input.images.size(); ++i) {
      AwaitEncoder(*sequence, static_cast<std::int32_t>(i));
    }
    scheduler_.StartOver(*sequence, now_);
  }
  scheduler_.ForgetContents();
  EndOverdue();
}

void Engine::EndOverdue() {
  while (!deadlines_.empty() && *(*deadlines_.begin())->request.deadline <= now_) {
    End(**deadlines_.begin(), {Status::kFinishedAborted, "deadline"});
  }
}

bool Engine::EndIfLive(SeqId seq_id, Status status, std::string detail) {
  Sequence* const sequence = Find(seq_id);
  if (sequence == nullptr) return false;
  End(*sequence, {status, std::move(detail)});
  return true;
}

void Engine::End(Sequence& sequence, Ending ending) {
  scheduler_.Withdraw(sequence);
  sequence.schedule.lifecycle.MoveTo(ending.status);
  Dismiss(sequence, sequence.NumMade(), std::move(ending.detail));
}

// Reports the end of a sequence and forgets it. Its blocks are free at once, since whatever comes
// into them is planned, and so computed, after the steps that are in flight now.
void Engine::Dismiss(Sequence& sequence, std::int64_t completion_tokens, std::string detail) {
  ++stats_.finished[sequence.status()];
  outbox_.AddFinish(sequence.request.client,
                    MakeFinish(sequence, completion_tokens, std::move(detail), now_));
  if (sequence.request.deadline) deadlines_.erase(&sequence);
  if (sequence.schedule.opened) closed_.push_back(sequence.request.id);
  if (!sequence.input.images.empty()) images_.Remove(sequence);
  scheduler_.Leave(sequence);
  auto node = live_.extract(sequence.request.id);
  if (sequence.schedule.num_rows > 0) leaving_.push_back(std::move(node.mapped()));
}

Stats Engine::GetStats() const {
  Stats stats = stats_;
  stats.num_waiting = scheduler_.queue().size();
  stats.num_running = static_cast<std::int64_t>(scheduler_.running().size());
  stats.blocks_total = scheduler_.blocks().num_blocks();
  stats.blocks_live = scheduler_.blocks().num_live();
  stats.blocks_free = scheduler_.blocks().num_free();
  stats.blocks_cached = scheduler_.blocks().num_cached();
  stats.num_preemptions = scheduler_.counts().preemptions;
  stats.prefix_cache_queries = scheduler_.counts().prefix_queries;
  stats.prefix_cache_hits = scheduler_.counts().prefix_hits;
  stats.state_slots_total = scheduler_.slots().num_slots();
  stats.state_slots_live = scheduler_.slots().num_live();
  return stats;
}

std::optional<Status> Engine::StatusOf(SeqId seq_id) const {
  const Sequence* const sequence = Find(seq_id);
  if (sequence == nullptr) return std::nullopt;
  return sequence->status();
}

int Engine::QueuePosition(SeqId seq_id) const {
  const Sequence* const sequence = Find(seq_id);
  if (sequence == nullptr || sequence->status() != Status::kWaiting) return 0;
  return scheduler_.queue().Position(*sequence);
}

std::vector<TokenId> Engine::OutputIds(SeqId seq_id) const {
  const Sequence* const sequence = Find(seq_id);
  return sequence == nullptr ? std::vector<TokenId>{} : sequence->output.tokens;
}

std::vector<SeqId> Engine::StructuredIds() const {
  std::vector<SeqId> ids;
  for (const Sequence* sequence : InOrderOfAdding()) {
    if (sequence->structured.wanted) ids.push_back(sequence->request.id);
  }
  return ids;
}

std::vector<Sequence*> Engine::InOrderOfAdding() const {
  std::vector<Sequence*> sequences;
  sequences.reserve(live_.size());
  for (const auto& [id, sequence] : live_) sequences.push_back(sequence.get());
  std::sort(sequences.begin(), sequences.end(), [](const Sequence* a, const Sequence* b) {
    return a->request.serial < b->request.serial;
  });
  return sequences;
}

Sequence* Engine::Find(SeqId seq_id) const {
  const auto at = live_.find(seq_id);
  return at == live_.end() ? nullptr : at->second.get();
}

Sequence* Engine::FindImage(SeqId seq_id, int image_index) const {
  Sequence* const sequence = Find(seq_id);
  if (sequence == nullptr) return nullptr;
  const std::size_t num_images = sequence->input.images.size();
  if (image_index < 0 || static_cast<std::size_t>(image_index) >= num_images) {
    throw std::invalid_argument("there is no image " + std::to_string(image_index) +
                                " in a sequence of " + std::to_string(num_images));
  }
  return sequence;
}

void Engine::AdvanceClock(Seconds now) {
  now_ = std::max(now_, now);
  for (const SeqId seq_id : seeing_) {
    if (Sequence* const sequence = Find(seq_id)) sequence->output.pixels_in = now_;
  }
  seeing_.clear();
}

}  // namespace airside
