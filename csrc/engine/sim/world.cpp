#include "engine/sim/world.h"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <utility>

#include "engine/ensure.h"

namespace airside::sim {

World::World(std::uint64_t seed, Tally& tally)
    : random_(seed), config_(DrawConfig()), tally_(tally), engine_(config_), worker_(config_) {}

int World::Draw(int low, int high) {
  // Not std::uniform_int_distribution: a seed must mean the same with every standard library.
  return low + static_cast<int>(random_() % static_cast<std::uint64_t>(high - low + 1));
}

EngineConfig World::DrawConfig() {
  EngineConfig config;
  config.num_blocks = Draw(1, 16);
  config.block_size = Draw(1, 6);
  config.max_num_seqs = Draw(1, 6);
  config.max_num_batched_tokens = Draw(1, 24);
  config.max_model_len = Draw(2, 48);
  config.enable_chunked_prefill = Chance(70);
  config.prefill_first = Chance(30);
  config.strict_fifo = Chance(30);
  config.preemption = Chance(70) ? PreemptionPolicy::kRecompute : PreemptionPolicy::kStop;
  if (Chance(70)) config.image_token_id = kImageToken;
  config.max_queued_requests = Draw(1, 16);
  config.max_queued_tokens = Draw(1, 200);
  return config;
}

void World::Step() {
  ++tally_.events;
  now_ += Draw(0, 3) * 0.25;
  const int dice = Draw(1, 100);
  if (dice <= 18) {
    Add();
  } else if (dice <= 60) {
    plan_ ? Apply() : Schedule();
  } else if (dice <= 78) {
    if (!live_.empty()) Shape(DrawLive());
  } else if (dice <= 94) {
    if (!live_.empty()) Ready(DrawLive());
  } else if (dice <= 97) {
    Abort();
  } else if (dice <= 98) {
    FailVision();
  } else {
    FailStep();
  }
  Look();
}

void World::Drain() {
  // A token costs at most a recompute of everything, which takes a bounded number of steps.
  const std::int64_t steps_max =
      100 + static_cast<std::int64_t>(live_.size()) * config_.max_model_len * config_.max_model_len;
  for (std::int64_t steps = 0; !live_.empty() || plan_; ++steps) {
    Ensure(steps <= steps_max, "some sequence never ends");
    if (!live_.empty()) {
      Shape(DrawLive());
      Look();
    }
    if (!live_.empty()) {
      Ready(DrawLive());
      Look();
    }
    plan_ ? Apply() : Schedule();
    Look();
  }
  const Stats stats = engine_.GetStats();
  Ensure(stats.blocks_live == 0, "a block is still live when nobody is");
  Ensure(stats.num_waiting == 0 && stats.num_running == 0, "somebody is still there");
  Ensure(!engine_.HasWork(), "work is left when nobody is");
  tally_.preemptions += stats.num_preemptions;
  tally_.recomputed_tokens += stats.recomputed_tokens;
}

Request World::DrawRequest() {
  Request request;
  request.seq_id = SeqId{num_requests_++};
  request.client = ClientId{Draw(0, 2)};
  request.arrival = now_ - Draw(0, 2);
  request.priority = Chance(80) ? 0 : Draw(-1, 1);
  if (Chance(15)) request.deadline = now_ + Draw(0, 40);
  if (Chance(80)) request.max_tokens = Draw(1, 12);
  request.min_tokens = Chance(20) ? Draw(1, 6) : 0;
  for (int i = Draw(0, 2); i > 0; --i) request.stop_token_ids.push_back(Draw(0, 9));
  request.token_ids.resize(Draw(1, std::min(config_.max_model_len + 1, 24)));
  for (std::size_t i = 0; i < request.token_ids.size(); ++i) {
    TokenId& token = request.token_ids[i];
    token = Draw(8, kVocabulary - 1);
    if (config_.image_token_id && Chance(12)) {
      token = kImageToken;
      request.image_positions.push_back(static_cast<std::int32_t>(i));
    }
  }
  return request;
}

SeqId World::DrawLive() {
  return std::next(live_.begin(), Draw(0, static_cast<int>(live_.size()) - 1))->first;
}

void World::Add() {
  ++tally_.requests;
  Request request = DrawRequest();
  if (!live_.empty() && Chance(3)) request.seq_id = DrawLive();
  const bool is_double = live_.contains(request.seq_id);
  const auto rejection = engine_.Add(request, now_);
  Ensure(is_double == (rejection && rejection->code == RejectionCode::kDuplicateId),
         "an id was taken twice, or refused without need");
  Ensure(!rejection || !rejection->detail.empty(), "a rejection that explains nothing");
  if (rejection) {
    ++tally_.rejections;
    return;
  }
  Trip trip;
  for (std::size_t i = 0; i < request.image_positions.size(); ++i) {
    std::vector<TokenId> expansion(Draw(1, 8));
    for (TokenId& token : expansion) token = Chance(70) ? kImageToken : Draw(8, 12);
    trip.pictures.push_back({.expansion = std::move(expansion)});
  }
  trip.ends = {"stop", "length"};
  if (!trip.pictures.empty()) trip.ends.insert("prompt_length_exceeded");
  if (request.deadline) trip.ends.insert("abort");
  if (config_.preemption == PreemptionPolicy::kStop) {
    trip.ends.insert("insufficient_system_resource");
  }
  trip.request = std::move(request);
  live_.emplace(trip.request.seq_id, std::move(trip));
}

// A random picture of the sequence, whether or not its shape is known already.
void World::Shape(SeqId seq_id) {
  Trip& trip = live_.at(seq_id);
  if (trip.pictures.empty()) return;
  const int index = Draw(0, static_cast<int>(trip.pictures.size()) - 1);
  Picture& picture = trip.pictures[index];
  const bool is_news = !picture.shape_known;
  picture.shape_known = true;
  Ensure(engine_.SetShape(seq_id, index, picture.expansion) == is_news, "a shape was lost");
}

void World::Ready(SeqId seq_id) {
  Trip& trip = live_.at(seq_id);
  if (trip.pictures.empty()) return;
  const int index = Draw(0, static_cast<int>(trip.pictures.size()) - 1);
  Picture& picture = trip.pictures[index];
  if (!picture.shape_known) return;
  const bool is_news = !std::exchange(picture.ready, true);
  Ensure(engine_.SetReady(seq_id, index) == is_news, "pixels were lost");
}

void World::Abort() {
  if (live_.empty() || Chance(10)) {
    Ensure(!engine_.Abort(SeqId{num_requests_}, "nobody"), "somebody unknown was aborted");
    return;
  }
  ++tally_.aborts;
  const SeqId seq_id = DrawLive();
  live_.at(seq_id).ends = {"abort"};
  Ensure(engine_.Abort(seq_id, "cancelled"), "a live sequence could not be aborted");
  Ensure(!engine_.Abort(seq_id, "cancelled"), "a sequence was aborted twice");
}

void World::FailVision() {
  if (live_.empty()) return;
  const SeqId seq_id = DrawLive();
  if (live_.at(seq_id).pictures.empty()) return;
  live_.at(seq_id).ends = {"vision_failed"};
  Ensure(engine_.FailVision(seq_id, "image 0: truncated"), "a picture could not fail");
}

void World::Schedule() {
  const bool had_work = engine_.HasWork();
  const std::size_t num_live = engine_.GetStats().num_waiting + engine_.GetStats().num_running;
  plan_ = engine_.Schedule(now_);
  const std::size_t num_left = engine_.GetStats().num_waiting + engine_.GetStats().num_running;
  // An end, by deadline, can take the work away, or open a strict queue.
  Ensure(had_work == plan_.has_value() || num_left < num_live, "work, but no plan, or vice versa");
  if (!plan_) return;
  Ensure(!engine_.HasWork() && !engine_.Schedule(now_), "two steps at once");
  ++tally_.steps;
  tally_.chunks += std::count(plan_->sampled.begin(), plan_->sampled.end(), 0);
}

void World::Apply() {
  // Only now: a worker may write at any time before it answers.
  const std::vector<TokenId> sampled = worker_.Execute(*plan_);
  engine_.Apply(std::exchange(plan_, std::nullopt)->step_id, sampled, now_);
}

void World::FailStep() {
  ++tally_.worker_failures;
  worker_.Restart();
  plan_.reset();
  engine_.FailStep(now_);
  Ensure(engine_.GetStats().blocks_live == 0, "blocks outlived the workers");
}

void World::Look() {
  engine_.Check();
  for (const ClientOutput& output : engine_.TakeOutputs()) {
    std::size_t next_token = 0;
    for (std::size_t row = 0; row < output.seq_ids.size(); ++row) {
      Ensure(live_.contains(output.seq_ids[row]), "a token of nobody");
      Ensure(live_.at(output.seq_ids[row]).request.client == output.client, "a token went astray");
      for (int i = 0; i < output.num_tokens[row]; ++i) {
        TakeToken(output.seq_ids[row], output.token_ids.at(next_token++));
      }
    }
    for (const Finish& finish : output.finished) TakeFinish(finish);
  }
  Ensure(engine_.GetStats().num_waiting + engine_.GetStats().num_running ==
             static_cast<std::int64_t>(live_.size()),
         "the clients wait for another number of requests than the engine has");
}

void World::TakeToken(SeqId seq_id, TokenId token) {
  Trip& trip = live_.at(seq_id);
  if (!trip.digest) trip.digest = DigestPrompt(trip);
  std::vector<TokenId> banned;
  if (static_cast<std::int64_t>(trip.made.size()) < trip.request.min_tokens) {
    banned = trip.request.stop_token_ids;
  }
  if (config_.image_token_id) banned.push_back(kImageToken);
  Ensure(token == NextToken(*trip.digest, banned), "a token that the model would not have made");
  trip.digest = Mix(*trip.digest, static_cast<std::uint64_t>(token));
  trip.made.push_back(token);
  ++tally_.tokens;
}

void World::TakeFinish(const Finish& finish) {
  const auto at = live_.find(finish.seq_id);
  Ensure(at != live_.end(), "an end of nobody, or a second one");
  const Trip& trip = at->second;
  const std::string reason(Reason(finish.status));
  Ensure(trip.ends.contains(reason), "a surprising end");
  const auto num_made = static_cast<std::int64_t>(trip.made.size());
  Ensure(finish.completion_tokens == num_made, "completion tokens miscounted");
  Ensure(finish.prompt_tokens == PromptTokens(trip), "prompt tokens miscounted");
  const std::int64_t room = config_.SequenceTokensMax() - finish.prompt_tokens;
  const auto& stops = trip.request.stop_token_ids;
  if (reason == "length") {
    Ensure(num_made == std::min(room, trip.request.max_tokens.value_or(room)), "not its length");
  } else if (reason == "stop") {
    Ensure(std::find(stops.begin(), stops.end(), trip.made.back()) != stops.end(), "not its stop");
    Ensure(num_made > trip.request.min_tokens, "stopped too early");
  } else if (reason == "prompt_length_exceeded") {
    Ensure(room < 1 && num_made == 0, "its prompt would have fitted");
  }
  ++tally_.finished[finish.status];
  live_.erase(at);
}

Digest World::DigestPrompt(const Trip& trip) const {
  Digest digest = 0;
  std::size_t picture = 0;
  for (const TokenId token : trip.request.token_ids) {
    if (token != kImageToken || trip.pictures.empty()) {
      digest = Mix(digest, static_cast<std::uint64_t>(token));
      continue;
    }
    Ensure(trip.pictures[picture].ready, "a token was made before the pictures were there");
    std::int32_t position = 0;
    for (const TokenId part : trip.pictures[picture].expansion) {
      digest = part == kImageToken ? MixEmbedding(digest, trip.request.seq_id,
                                                  static_cast<std::int32_t>(picture), position++)
                                   : Mix(digest, static_cast<std::uint64_t>(part));
    }
    ++picture;
  }
  return digest;
}

std::int64_t World::PromptTokens(const Trip& trip) const {
  auto total = static_cast<std::int64_t>(trip.request.token_ids.size());
  for (const Picture& picture : trip.pictures) {
    if (!picture.shape_known) return static_cast<std::int64_t>(trip.request.token_ids.size());
    total += static_cast<std::int64_t>(picture.expansion.size()) - 1;
  }
  return total;
}

}  // namespace airside::sim
