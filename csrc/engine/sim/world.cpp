#include "engine/sim/world.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <iterator>
#include <span>
#include <string>
#include <utility>

#include "engine/ensure.h"
#include "engine/sim/plan_check.h"

namespace airside::sim {
namespace {

// Looking at everything costs more than an event.
constexpr std::int64_t kLooksPerCheck = 8;

// How often a request that could move may be overtaken by later ones of its priority. Users take
// turns, so it is the others' arrears that decide, and those are small in a world as small as this.
constexpr std::int32_t kOvertakenMax = 60;

// Hands out a column of records piece by piece.
class Records {
 public:
  explicit Records(std::span<const std::byte> bytes) : left_(bytes) {}

  std::vector<std::uint32_t> Take(std::int32_t num_bytes) {
    Ensure(num_bytes % 4 == 0 && static_cast<std::size_t>(num_bytes) <= left_.size(),
           "records shorter than their sizes");
    std::vector<std::uint32_t> words(num_bytes / 4);
    if (num_bytes > 0) std::memcpy(words.data(), left_.data(), num_bytes);
    left_ = left_.subspan(num_bytes);
    return words;
  }
  bool AllTaken() const { return left_.empty(); }

 private:
  std::span<const std::byte> left_;
};

}  // namespace

World::World(std::uint64_t seed, Tally& tally)
    : dice_(seed),
      config_(DrawConfig(dice_)),
      tally_(tally),
      requests_(config_, dice_),
      engine_(config_),
      worker_(config_, seed) {}

void World::Step() {
  ++tally_.events;
  now_ += dice_.Draw(0, 3) * 0.25;
  const int dice = dice_.Draw(1, 100);
  if (dice <= 6 || live_.empty()) {
    Add();
  } else if (dice <= 28) {
    Schedule();
  } else if (dice <= 46) {
    Execute();
  } else if (dice <= 68) {
    Apply();
  } else if (dice <= 79) {
    Shape(DrawLive());
  } else if (dice <= 90) {
    Ready(DrawLive());
  } else if (dice <= 99) {
    BuildGrammar(DrawLive());
  } else {
    Disturb();
  }
  Look();
}

// What ends sequences or steps before their time, or leaves them alone for long.
void World::Disturb() {
  const int dice = dice_.Draw(1, 12);
  if (dice <= 5) {
    End();
  } else if (dice <= 7) {
    Settle();
  } else if (dice <= 10) {
    StopByClient(DrawLive());
  } else {
    FailStep();
  }
}

// A token costs at most a recompute of everything, which takes a bounded number of steps.
std::int64_t World::StepsMax() const {
  const std::int64_t length_max = config_.max_model_len;
  return 300 + 3 * static_cast<std::int64_t>(live_.size()) * length_max * length_max;
}

// Without news of pictures and grammars, what waits for them comes to rest.
void World::Settle() {
  const std::int64_t steps_max = StepsMax();
  for (std::int64_t steps = 0; engine_.HasWork() || !flights_.empty(); ++steps) {
    Ensure(steps <= steps_max, "work without end for sequences that cannot go on");
    Advance();
    Look();
  }
}

void World::Drain() {
  const std::int64_t steps_max = StepsMax();
  for (std::int64_t steps = 0; !live_.empty() || !flights_.empty(); ++steps) {
    Ensure(steps <= steps_max, "some sequence never ends");
    for (const auto act : {&World::Shape, &World::Ready, &World::BuildGrammar}) {
      if (!live_.empty()) (this->*act)(DrawLive());
      Look();
    }
    Advance();
    Look();
  }
  CheckAtRest();
}

void World::CheckAtRest() {
  engine_.Check();
  const Stats stats = engine_.GetStats();
  Ensure(stats.blocks_live == 0, "a block is still live when nobody is");
  Ensure(stats.state_slots_live == 0, "a state slot is still live when nobody is");
  Ensure(stats.num_waiting == 0 && stats.num_running == 0, "somebody is still there");
  Ensure(!engine_.HasWork(), "work is left when nobody is");
  tally_.preemptions[config_.victim_rule] += stats.num_preemptions;
  tally_.recomputed_tokens += stats.recomputed_tokens;
  tally_.cached_tokens += stats.prefix_cache_hits;
  tally_.draft_tokens += stats.draft_tokens;
  tally_.accepted_tokens += stats.accepted_tokens;
}

void World::Advance() {
  if (dice_.Chance(60)) Schedule();
  if (flights_.empty()) return;
  if (dice_.Chance(50)) Execute();
  if (dice_.Chance(50)) Apply();
}

SeqId World::DrawLive() {
  return std::next(live_.begin(), dice_.Draw(0, static_cast<int>(live_.size()) - 1))->first;
}

void World::Add() {
  ++tally_.requests;
  Request request = requests_.Next(SeqId{num_requests_++}, now_);
  if (!live_.empty() && dice_.Chance(3)) request.seq_id = DrawLive();
  const bool is_double = live_.contains(request.seq_id);
  Trip trip(request, requests_.PicturesOf(request), config_);
  if (request.golden.mode == GoldenMode::kDraft) {
    request.golden.tokens = trip.Foresee(request.golden.tokens.size());
    if (request.golden.tokens.empty()) request.golden = {};
  }
  for (std::size_t i = 0; i < trip.pictures().size(); ++i) {
    if (trip.pictures()[i].is_fetched) request.image_hashes[i].reset();
  }
  const SeqId seq_id = request.seq_id;
  const auto rejection = engine_.Add(std::move(request), now_);
  Ensure(is_double == (rejection && rejection->code == RejectionCode::kDuplicateId),
         "an id was taken twice, or refused without need");
  Ensure(!rejection || !rejection->detail.empty(), "a rejection that explains nothing");
  Ensure(!rejection || rejection->code != RejectionCode::kInvalid, "a request of the wrong kind");
  if (rejection) {
    ++tally_.rejections[rejection->code];
    return;
  }
  worker_.Introduce(seq_id, trip.AsPassenger());
  live_.emplace(seq_id, std::move(trip));
}

// Mostly the first picture of which that is not known, now and then any.
int World::DrawPicture(const std::vector<Picture>& pictures, bool Picture::* is_known) {
  const auto first = std::find_if(pictures.begin(), pictures.end(),
                                  [&](const Picture& picture) { return !(picture.*is_known); });
  if (first != pictures.end() && dice_.Chance(80))
    return static_cast<int>(first - pictures.begin());
  return dice_.Draw(0, static_cast<int>(pictures.size()) - 1);
}

void World::Shape(SeqId seq_id) {
  Trip& trip = live_.at(seq_id);
  if (trip.pictures().empty()) return;
  const int index = DrawPicture(trip.pictures(), &Picture::shape_known);
  const bool is_news = trip.SetShape(index);
  Ensure(engine_.SetShape(seq_id, index, trip.pictures()[index].shape) == is_news,
         "a shape was lost");
}

void World::Ready(SeqId seq_id) {
  Trip& trip = live_.at(seq_id);
  if (trip.pictures().empty()) return;
  const int index = DrawPicture(trip.pictures(), &Picture::ready);
  if (!trip.pictures()[index].shape_known) return;
  const bool is_news = trip.SetReady(index);
  Ensure(engine_.SetReady(seq_id, index) == is_news, "pixels were lost");
}

// One of the two things that happen to a grammar in each launch of the workers: it is asked for,
// with the output so far, and it is there, or will never be.
void World::BuildGrammar(SeqId seq_id) {
  Trip& trip = live_.at(seq_id);
  if (!trip.request().structured) return;
  if (!trip.grammar_opened) {
    const std::vector<TokenId> output = engine_.OutputIds(seq_id);
    Ensure(output == trip.Made(), "an output that the client was not told");
    worker_.OpenGrammar(seq_id, output);
    trip.grammar_opened = true;
  } else if (dice_.Chance(3)) {
    trip.FailGrammar();
    Ensure(engine_.FailGrammar(seq_id, "no such rule"), "a grammar could not fail");
  } else {
    const bool is_news = !std::exchange(trip.grammar_ready, true);
    Ensure(engine_.SetGrammarReady(seq_id) == is_news, "a grammar was lost");
  }
}

void World::End() {
  if (dice_.Chance(10)) {
    Ensure(!engine_.Abort(SeqId{num_requests_}, "nobody"), "somebody unknown was aborted");
    return;
  }
  ++tally_.aborts;
  const SeqId seq_id = DrawLive();
  Trip& trip = live_.at(seq_id);
  if (!trip.pictures().empty() && dice_.Chance(50)) {
    trip.FailVision();
    Ensure(engine_.FailVision(seq_id, "image 0: truncated"), "a picture could not fail");
    return;
  }
  trip.Abort();
  Ensure(engine_.Abort(seq_id, "cancelled"), "a live sequence could not be aborted");
  Ensure(!engine_.Abort(seq_id, "cancelled"), "a sequence was aborted twice");
}

void World::StopByClient(SeqId seq_id) {
  Trip& trip = live_.at(seq_id);
  if (trip.num_made() == 0) return;
  ++tally_.client_stops;
  const std::int64_t num_tokens = dice_.Draw(0, trip.num_made());
  trip.StopAt(num_tokens);
  Ensure(engine_.Stop(seq_id, num_tokens, "a stop string"), "a live sequence could not be stopped");
}

void World::Schedule() {
  const bool had_work = engine_.HasWork();
  const Stats before = engine_.GetStats();
  std::optional<StepPlan> plan = engine_.Schedule(now_);
  const Stats after = engine_.GetStats();
  const bool some_ended =
      after.num_waiting + after.num_running < before.num_waiting + before.num_running;
  // An end, by deadline, can take the work away, or open a strict queue. With a step in flight
  // there may be work, but no room.
  Ensure(had_work || !plan || some_ended, "a plan without work");
  Ensure(!had_work || plan || some_ended || !flights_.empty(), "work, but no plan");
  CountOvertaken();
  if (!plan) return;
  TakePlan(*plan);
  flights_.push_back({std::move(*plan), std::nullopt});
  Ensure(static_cast<int>(flights_.size()) == engine_.StepsInFlight() &&
             engine_.StepsInFlight() <= (config_.async_scheduling ? 2 : 1),
         "too many steps in flight");
}

void World::TakePlan(const StepPlan& plan) {
  const PlanCheck check(config_, live_, plan, flights_.empty() ? nullptr : &flights_.back().plan);
  check.Run();
  ++tally_.steps;
  if (!flights_.empty()) ++tally_.overlapped_steps;
  for (const PlanRow& row : check.rows()) {
    ++tally_.rows;
    if (row.num_sampled == 0) ++tally_.chunks;
    if (row.state_from != BlockId{-1}) ++tally_.states_from_blocks;
    if (row.position_shift > 0) ++tally_.shifted_rows;
    const auto drafts = static_cast<std::size_t>(row.num_drafts());
    ++tally_.draft_lengths[std::min(drafts, tally_.draft_lengths.size() - 1)];
  }
  tally_.forced_tokens += std::count_if(plan.forced.begin(), plan.forced.end(),
                                        [](TokenId token) { return token >= 0; });
  for (const ImageId& image : plan.ahead) live_.at(image.seq_id).Encode(image.image_index);
  for (const ImageSlice& slice : plan.images) live_.at(slice.seq_id).Encode(slice.image_index);
}

// A newcomer that runs now has overtaken those of its priority that came before it and could move.
void World::CountOvertaken() {
  std::vector<const Trip*> admitted;
  for (auto& [seq_id, trip] : live_) {
    if (trip.was_admitted || engine_.StatusOf(seq_id) != Status::kRunning) continue;
    trip.was_admitted = true;
    admitted.push_back(&trip);
  }
  for (const Trip* newcomer : admitted) {
    const Request& passing = newcomer->request();
    for (auto& [seq_id, trip] : live_) {
      const Request& passed = trip.request();
      if (passed.deadline && *passed.deadline <= now_) continue;  // it has just ended
      if (trip.was_admitted || passed.priority != passing.priority) continue;
      const bool holds_up = config_.strict_fifo || trip.MayMove();
      Ensure(!holds_up || passed.user != passing.user || !trip.IsDueBefore(*newcomer),
             "overtaken by one of the same user");
      if (!trip.MayMove() || passing.seq_id < seq_id) continue;
      tally_.overtaken_max = std::max(tally_.overtaken_max, ++trip.num_overtaken);
      Ensure(trip.num_overtaken <= kOvertakenMax, "overtaken again and again");
    }
  }
}

// At any time before the answer, but in order.
void World::Execute() {
  const auto next = std::find_if(flights_.begin(), flights_.end(),
                                 [](const Flight& flight) { return !flight.result; });
  if (next != flights_.end()) next->result = worker_.Execute(next->plan);
}

void World::Apply() {
  if (flights_.empty()) return;
  if (!flights_.front().result) Execute();
  Flight flight = std::move(flights_.front());
  flights_.pop_front();
  for (const SeqId seq_id : flight.plan.seq_ids) {
    if (!live_.contains(seq_id)) ++tally_.discarded_rows;
  }
  engine_.Apply(flight.plan.step_id, flight.result->View(), now_);
}

void World::FailStep() {
  ++tally_.worker_failures;
  worker_.Restart();
  flights_.clear();
  for (auto& [seq_id, trip] : live_) trip.grammar_opened = trip.grammar_ready = false;
  for (auto& [seq_id, trip] : live_) trip.ForgetEncoded();
  engine_.FailStep(now_);
  Ensure(engine_.GetStats().blocks_live == 0 && engine_.GetStats().blocks_cached == 0,
         "blocks outlived the workers");
}

void World::Look() {
  if (num_looks_++ % kLooksPerCheck == 0) engine_.Check();
  for (const ClientOutput& output : engine_.TakeOutputs()) TakeOutput(output);
  const Stats stats = engine_.GetStats();
  Ensure(stats.num_waiting + stats.num_running == static_cast<std::int64_t>(live_.size()),
         "the clients wait for another number of requests than the engine has");
  Ensure(stats.blocks_free + stats.blocks_live == config_.num_blocks &&
             stats.blocks_cached <= stats.blocks_free,
         "blocks are miscounted");
}

void World::TakeOutput(const ClientOutput& output) {
  Records prompt_records(output.prompt_logprobs);
  for (std::size_t row = 0; row < output.prompt_seq_ids.size(); ++row) {
    Trip& trip = live_.at(output.prompt_seq_ids[row]);
    trip.TakePromptRecords(prompt_records.Take(output.prompt_sizes.at(row)));
    ++tally_.records;
  }
  Ensure(prompt_records.AllTaken(), "records of a prompt of nobody");
  Records records(output.logprobs);
  std::size_t next_token = 0;
  for (std::size_t row = 0; row < output.seq_ids.size(); ++row) {
    Ensure(live_.contains(output.seq_ids[row]), "a token of nobody");
    Trip& trip = live_.at(output.seq_ids[row]);
    Ensure(trip.request().client == output.client, "a token went astray");
    const int count = output.num_tokens[row];
    const int size = output.logprob_sizes.empty() ? 0 : output.logprob_sizes.at(row);
    const std::vector<std::uint32_t> words = records.Take(size);
    const std::size_t each = words.size() / count;
    for (int i = 0; i < count; ++i) {
      trip.TakeToken(output.token_ids.at(next_token++), std::span(words).subspan(i * each, each));
      ++tally_.tokens;
      if (each > 0) ++tally_.records;
    }
  }
  Ensure(next_token == output.token_ids.size() && records.AllTaken(), "more tokens than rows say");
  for (const Finish& finish : output.finished) TakeFinish(output, finish);
}

void World::TakeFinish(const ClientOutput& output, const Finish& finish) {
  const auto at = live_.find(finish.seq_id);
  Ensure(at != live_.end(), "an end of nobody, or a second one");
  Ensure(at->second.request().client == output.client, "an end went astray");
  at->second.TakeFinish(finish, now_);
  ++tally_.finished[finish.status];
  live_.erase(at);
}

}  // namespace airside::sim
