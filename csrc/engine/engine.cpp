#include "engine/engine.h"

#include <algorithm>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "engine/ensure.h"

namespace airside {
namespace {

// Not recomputed: what made the logits no numbers would most likely do so again, for ever.
constexpr const char* kNoTokenDetail = "the model failed: its logits gave no token a probability";

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
  const auto at =
      live_.emplace(id, std::make_unique<Sequence>(MakeSequence(std::move(request), num_added_++)));
  Sequence& sequence = *at.first->second;
  if (sequence.request.deadline) deadlines_.insert(&sequence);
  scheduler_.Enqueue(sequence);
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

bool Engine::SetShape(SeqId seq_id, int image_index, std::vector<TokenId> expansion) {
  if (expansion.empty()) throw std::invalid_argument("an expansion needs at least one token");
  if (auto fault = FindStranger("expansion", expansion, config_)) {
    throw std::invalid_argument(*fault);
  }
  Sequence* const sequence = FindImage(seq_id, image_index);
  if (sequence == nullptr) return false;
  Image& image = sequence->input.images[image_index];
  if (image.state != Image::State::kShapeUnknown) return false;

  scheduler_.Withdraw(*sequence);
  image.state = Image::State::kPixelsPending;
  image.expansion = std::move(expansion);
  if (sequence->ShapesKnown()) ExpandPrompt(sequence->input);
  scheduler_.Enqueue(*sequence);

  if (sequence->ShapesKnown()) {
    const auto num_tokens = static_cast<std::int64_t>(sequence->input.prompt.size());
    if (auto misfit = FindMisfit(num_tokens, config_)) {
      End(*sequence, Status::kFinishedIgnored, std::move(misfit->detail));
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
  if (waits) scheduler_.Enqueue(*sequence);
  return true;
}

bool Engine::Abort(SeqId seq_id, std::string cause) {
  Sequence* const sequence = Find(seq_id);
  if (sequence == nullptr) return false;
  End(*sequence, Status::kFinishedAborted, std::move(cause));
  return true;
}

bool Engine::FailVision(SeqId seq_id, std::string detail) {
  Sequence* const sequence = Find(seq_id);
  if (sequence == nullptr) return false;
  End(*sequence, Status::kFinishedVeFailed, std::move(detail));
  return true;
}

std::optional<StepPlan> Engine::Schedule(Seconds now) {
  AdvanceClock(now);
  EndOverdue();
  if (in_flight_) return std::nullopt;
  Scheduler::Selection selection = scheduler_.Schedule();
  for (Sequence* sequence : selection.stopped) {
    Dismiss(*sequence, "preempted: sequences ahead of it needed its KV blocks");
  }
  if (selection.rows.empty()) return std::nullopt;
  for (const Row& row : selection.rows) {
    auto& first_scheduled = row.sequence->output.first_scheduled;
    if (!first_scheduled) first_scheduled = now_;
  }
  in_flight_.emplace(InFlight{StepId{++num_scheduled_}, std::move(selection.rows), {}});
  return MakeStepPlan(in_flight_->id, in_flight_->rows, config_.image_token_id);
}

void Engine::Apply(StepId step_id, std::span<const TokenId> sampled, Seconds now) {
  if (!in_flight_ || in_flight_->id != step_id) {
    throw std::invalid_argument("step " + std::to_string(static_cast<std::uint64_t>(step_id)) +
                                " is not in flight");
  }
  const auto& planned = in_flight_->rows;
  const auto num_sampled = std::count_if(planned.begin(), planned.end(),
                                         [](const Row& row) { return row.ReachesEnd(); });
  if (static_cast<std::size_t>(num_sampled) != sampled.size()) {
    throw std::invalid_argument(std::to_string(sampled.size()) + " tokens for " +
                                std::to_string(num_sampled) + " sampled rows");
  }
  AdvanceClock(now);
  ++stats_.steps;
  const InFlight step = CloseStep();  // keeps those that are leaving until the rows are done with
  auto next_token = sampled.begin();
  for (const Row& row : step.rows) {
    Sequence& sequence = *row.sequence;
    const bool has_token = row.ReachesEnd();
    const TokenId token = has_token ? *next_token++ : TokenId{};
    if (IsFinal(sequence.status())) continue;
    CountComputed(row);
    sequence.cache.num_computed += row.num_new;
    if (token < 0) {
      End(sequence, Status::kFinishedAborted, kNoTokenDetail);
      continue;
    }
    if (has_token) TakeToken(sequence, token);
    if (!has_token || !EndIfComplete(sequence)) scheduler_.ParkIfIdle(sequence);
  }
  for (const auto& sequence : step.leaving) scheduler_.Release(*sequence);
}

void Engine::FailStep(Seconds now) {
  AdvanceClock(now);
  if (in_flight_) {
    const InFlight step = CloseStep();
    for (const auto& sequence : step.leaving) scheduler_.Release(*sequence);
  }
  scheduler_.ForgetCaches();
  EndOverdue();
}

Engine::InFlight Engine::CloseStep() {
  InFlight step = std::move(*in_flight_);
  in_flight_.reset();
  for (const Row& row : step.rows) row.sequence->schedule.num_in_flight = 0;
  return step;
}

void Engine::CountComputed(const Row& row) {
  Sequence& sequence = *row.sequence;
  const std::int32_t begin = sequence.cache.num_computed;
  const std::int32_t end = begin + row.num_new;
  std::int32_t& computed_max = sequence.schedule.num_computed_max;
  const std::int32_t fresh = std::clamp(computed_max, begin, end);
  const auto prompt_end = static_cast<std::int32_t>(sequence.input.prompt.size());
  stats_.recomputed_tokens += fresh - begin;
  stats_.prompt_tokens += std::max(std::min(end, prompt_end) - fresh, 0);
  computed_max = std::max(computed_max, end);
}

void Engine::TakeToken(Sequence& sequence, TokenId token) {
  sequence.output.tokens.push_back(token);
  if (!sequence.output.first_token) sequence.output.first_token = now_;
  ++stats_.generation_tokens;
  outbox_.AddToken(sequence.request.client, sequence.request.id, token);
}

// The stop check, after each token. A stop token is part of the output.
bool Engine::EndIfComplete(Sequence& sequence) {
  const Sequence::Generation& generation = sequence.generation;
  const TokenId token = sequence.output.tokens.back();
  const auto num_made = static_cast<std::int64_t>(sequence.output.tokens.size());
  const auto& stops = generation.stop_token_ids;
  // It was not banned only if enough had been made before it.
  if (num_made - 1 >= generation.tokens_min &&
      std::find(stops.begin(), stops.end(), token) != stops.end()) {
    End(sequence, Status::kFinishedStopped, "token " + std::to_string(token));
    return true;
  }
  if (num_made >= generation.tokens_max || sequence.Length() >= config_.SequenceTokensMax()) {
    End(sequence, Status::kFinishedLengthCapped, DescribeLimit(sequence));
    return true;
  }
  return false;
}

std::string Engine::DescribeLimit(const Sequence& sequence) const {
  const Sequence::Generation& generation = sequence.generation;
  if (static_cast<std::int64_t>(sequence.output.tokens.size()) >= generation.tokens_max) {
    return "max_tokens " + std::to_string(generation.tokens_max);
  }
  if (sequence.Length() >= config_.max_model_len) {
    return "the context of " + std::to_string(config_.max_model_len) + " tokens is full";
  }
  return "the KV pool of " + std::to_string(config_.PoolTokens()) + " tokens is full";
}

void Engine::EndOverdue() {
  while (!deadlines_.empty() && *(*deadlines_.begin())->request.deadline <= now_) {
    End(**deadlines_.begin(), Status::kFinishedAborted, "deadline");
  }
}

void Engine::End(Sequence& sequence, Status final_status, std::string detail) {
  scheduler_.Withdraw(sequence);
  sequence.schedule.lifecycle.MoveTo(final_status);
  Dismiss(sequence, std::move(detail));
}

// Reports the end of a sequence and forgets it; one in flight keeps its blocks until the step is
// closed.
void Engine::Dismiss(Sequence& sequence, std::string detail) {
  ++stats_.finished[sequence.status()];
  outbox_.AddFinish(sequence.request.client, MakeFinish(sequence, std::move(detail)));
  if (sequence.request.deadline) deadlines_.erase(&sequence);
  auto node = live_.extract(sequence.request.id);
  if (sequence.schedule.num_in_flight > 0) {
    in_flight_->leaving.push_back(std::move(node.mapped()));
  } else {
    scheduler_.Release(sequence);
  }
}

Finish Engine::MakeFinish(const Sequence& sequence, std::string detail) const {
  const Sequence::Output& output = sequence.output;
  // Front ends stamp arrivals with their own clocks, which may be a little ahead.
  const auto since = [](Seconds from, Seconds until) { return std::max(until - from, 0.0); };
  const Seconds arrival = sequence.request.arrival;
  return {.seq_id = sequence.request.id,
          .status = sequence.status(),
          .detail = std::move(detail),
          .prompt_tokens = static_cast<std::int64_t>(sequence.input.prompt.size()),
          .image_tokens = sequence.NumImageTokens(),
          .completion_tokens = static_cast<std::int64_t>(output.tokens.size()),
          .preemptions = output.num_preemptions,
          .queued_s = since(arrival, output.first_scheduled.value_or(now_)),
          .time_to_first_token_s = output.first_token ? since(arrival, *output.first_token) : 0,
          .decode_s = output.first_token ? since(*output.first_token, now_) : 0};
}

Stats Engine::GetStats() const {
  Stats stats = stats_;
  stats.num_waiting = scheduler_.queue().size();
  stats.num_running = static_cast<std::int64_t>(scheduler_.running().size());
  stats.blocks_total = scheduler_.blocks().num_blocks();
  stats.blocks_live = scheduler_.blocks().num_live();
  stats.blocks_free = scheduler_.blocks().num_free();
  stats.num_preemptions = scheduler_.num_preemptions();
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

void Engine::AdvanceClock(Seconds now) { now_ = std::max(now_, now); }

}  // namespace airside
