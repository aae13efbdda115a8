#include "engine/sim/trip.h"

#include <algorithm>
#include <cstddef>
#include <tuple>
#include <utility>

#include "engine/ensure.h"
#include "engine/step_result.h"

namespace airside::sim {
namespace {

bool AreRecords(std::span<const std::uint32_t> words, const std::vector<std::uint32_t>& expected) {
  return std::equal(words.begin(), words.end(), expected.begin(), expected.end());
}

}  // namespace

Trip::Trip(Request request, std::vector<Picture> pictures, const EngineConfig& config)
    : request_(std::move(request)),
      pictures_(std::move(pictures)),
      config_(config),
      tokens_(request_.token_ids),
      num_prompt_tokens_(static_cast<std::int32_t>(tokens_.size())) {}

bool Trip::ShapesKnown() const {
  return std::all_of(pictures_.begin(), pictures_.end(),
                     [](const Picture& picture) { return picture.shape_known; });
}

std::int32_t Trip::PositionShift(std::int32_t position) const {
  std::int32_t shift = 0;
  std::int32_t place = 0;
  std::size_t next_picture = 0;
  for (const TokenId token : request_.token_ids) {
    if (token != kImageToken) {
      ++place;
      continue;
    }
    const ImageShape& shape = pictures_[next_picture++].shape;
    const auto num_tokens = static_cast<std::int32_t>(shape.expansion.size());
    place += num_tokens;
    if (place <= position && shape.rope_advance) shift += num_tokens - *shape.rope_advance;
  }
  return shift;
}

Passenger Trip::AsPassenger() const {
  Passenger passenger{request_.cache_salt, {}, !request_.logit_rules.Empty()};
  for (const Picture& picture : pictures_) passenger.pictures.push_back(picture.content);
  return passenger;
}

bool Trip::IsDueBefore(const Trip& other) const {
  const auto key = [](const Request& request) {
    const Seconds patient = request.arrival + 60;
    return std::make_tuple(std::min(request.deadline.value_or(patient), patient), request.arrival,
                           request.seq_id);
  };
  return key(request_) < key(other.request_);
}

bool Trip::SetShape(int index) {
  const bool is_news = !std::exchange(pictures_[index].shape_known, true);
  if (is_news && ShapesKnown()) ExpandPrompt();
  return is_news;
}

bool Trip::SetReady(int index) { return !std::exchange(pictures_[index].ready, true); }

void Trip::ExpandPrompt() {
  tokens_.clear();
  std::size_t picture = 0;
  for (const TokenId token : request_.token_ids) {
    if (token == kImageToken) {
      const auto& expansion = pictures_[picture++].shape.expansion;
      tokens_.insert(tokens_.end(), expansion.begin(), expansion.end());
    } else {
      tokens_.push_back(token);
    }
  }
  num_prompt_tokens_ = static_cast<std::int32_t>(tokens_.size());
}

bool Trip::SplitsPicture(std::int32_t end) const {
  if (!config_.atomic_images) return false;
  std::int32_t place = 0;
  std::size_t next_picture = 0;
  for (const TokenId token : request_.token_ids) {
    if (token != kImageToken) {
      ++place;
      continue;
    }
    const auto& expansion = pictures_[next_picture++].shape.expansion;
    for (std::size_t i = 1; i < expansion.size(); ++i) {
      const bool is_inside = expansion[i - 1] == kImageToken && expansion[i] == kImageToken;
      if (is_inside && place + static_cast<std::int32_t>(i) == end) return true;
    }
    place += static_cast<std::int32_t>(expansion.size());
  }
  return false;
}

std::int32_t Trip::LongestWholePicture() const {
  std::int32_t longest = 0;
  for (const Picture& picture : pictures_) {
    std::int32_t length = 0;
    for (const TokenId token : picture.shape.expansion) {
      length = token == kImageToken ? length + 1 : 0;
      longest = std::max(longest, length);
    }
  }
  return config_.atomic_images ? longest : 0;
}

// Computes the prompt, as soon as something of the sequence is told.
void Trip::Board() {
  if (std::exchange(boarded_, true)) return;
  Ensure(ShapesKnown(), "something was computed before all shapes were known");
  prefix_ = StartPrefix(request_.cache_salt);
  if (config_.num_state_slots > 0) state_ = Mix(0, 0);
  const Digest rules = DigestRules(request_.logit_rules);
  const auto take = [&](TokenId token, Prefix after) {
    prefix_ = after;
    prompt_prefixes_.push_back(after);
    if (state_ != 0) state_ = Mix(state_, static_cast<std::uint64_t>(token));
    if (!request_.logit_rules.Empty()) history_ += WeighToken(rules, token);
  };
  std::size_t next_picture = 0;
  for (const TokenId token : request_.token_ids) {
    if (token != kImageToken) {
      take(token, Extend(prefix_, token));
      continue;
    }
    const Picture& picture = pictures_[next_picture++];
    std::int32_t place = 0;
    for (const TokenId part : picture.shape.expansion) {
      take(part, part == kImageToken ? ExtendByPicture(prefix_, picture.content, place++)
                                     : Extend(prefix_, part));
    }
  }
}

TokenId Trip::NextToken() const {
  const auto position = static_cast<std::size_t>(num_made());
  const Golden& golden = request_.golden;
  if (golden.mode == GoldenMode::kForce && position < golden.tokens.size()) {
    return golden.tokens[position];
  }
  std::vector<TokenId> banned;
  if (num_made() < request_.min_tokens) banned = request_.stop_token_ids;
  if (config_.image_token_id) banned.push_back(kImageToken);
  Draw draw{.prefix = prefix_,
            .state = state_,
            .seed = request_.sampling.seed,
            .position = num_made(),
            .banned = banned,
            .history = history_};
  if (request_.structured) draw.grammar = DigestGrammar(Made(), {});
  return Sample(draw);
}

void Trip::TakeToken(TokenId token, std::span<const std::uint32_t> words) {
  Board();
  Ensure(!HasStopped() && num_made() < LengthMax(), "a token after the last");
  Ensure(token == NextToken(), "a token that the model would not have made");
  Ensure(!request_.structured || grammar_ready, "a token before its grammar was built");
  std::vector<std::uint32_t> record;
  if (request_.logprobs >= 0) AppendRecord(prefix_, token, request_.logprobs, record);
  Ensure(AreRecords(words, record), "a record of another token");
  prefix_ = Extend(prefix_, token);
  if (state_ != 0) state_ = Mix(state_, static_cast<std::uint64_t>(token));
  if (!request_.logit_rules.Empty()) {
    history_ += WeighToken(DigestRules(request_.logit_rules), token);
  }
  tokens_.push_back(token);
}

std::vector<TokenId> Trip::Foresee(std::size_t count) const {
  Trip alone = *this;
  for (std::size_t i = 0; i < pictures_.size(); ++i) alone.SetShape(static_cast<int>(i));
  alone.Board();
  alone.grammar_ready = true;
  alone.request_.logprobs = -1;
  while (alone.num_made() < static_cast<std::int64_t>(count) && !alone.HasStopped() &&
         alone.num_made() < alone.LengthMax()) {
    const TokenId token = alone.NextToken();
    if (token < 0) break;
    alone.TakeToken(token, {});
  }
  return alone.Made();
}

void Trip::TakePromptRecords(std::span<const std::uint32_t> words) {
  Ensure(request_.prompt_logprobs >= 0, "records of a prompt that nobody asked for");
  Board();
  const std::size_t size = 4 + 2 * static_cast<std::size_t>(request_.prompt_logprobs);
  Ensure(!words.empty() && words.size() % size == 0, "half a record");
  for (; !words.empty(); words = words.subspan(size)) {
    const std::int32_t target = num_prompt_records_ + 1;
    Ensure(target < num_prompt_tokens_, "more records than the prompt has positions");
    std::vector<std::uint32_t> record;
    AppendRecord(prompt_prefixes_[num_prompt_records_], tokens_[target], request_.prompt_logprobs,
                 record);
    Ensure(AreRecords(words.first(size), record), "a record of another prompt position");
    num_prompt_records_ = target;
  }
}

std::int64_t Trip::LengthMax() const {
  const std::int64_t room = config_.SequenceTokensMax() - num_prompt_tokens_;
  return std::min(room, request_.max_tokens.value_or(room));
}

bool Trip::HasStopped() const {
  const auto& stops = request_.stop_token_ids;
  const Golden& golden = request_.golden;
  const bool is_stop = num_made() > request_.min_tokens &&
                       std::find(stops.begin(), stops.end(), tokens_.back()) != stops.end();
  const bool is_out_of_golden = golden.mode == GoldenMode::kForce &&
                                num_made() == static_cast<std::int32_t>(golden.tokens.size());
  return is_stop || is_out_of_golden;
}

void Trip::TakeFinish(const Finish& finish, Seconds now) {
  Ensure(!finish.detail.empty(), "an end that explains nothing");
  const std::int64_t completion = stopped_at_.value_or(num_made());
  Ensure(finish.completion_tokens == completion, "completion tokens miscounted");
  Ensure(finish.prompt_tokens == num_prompt_tokens_, "prompt tokens miscounted");
  Ensure(finish.accepted_tokens <= finish.draft_tokens, "more drafts accepted than verified");
  Ensure(finish.cached_tokens < num_prompt_tokens_ || finish.cached_tokens == 0,
         "a prompt that was cached to its end");
  Ensure(request_.prompt_logprobs < 0 || num_made() == 0 ||
             num_prompt_records_ == num_prompt_tokens_ - 1,
         "a token before all records of the prompt");
  switch (finish.status) {
    case Status::kFinishedStopped:
      return Ensure(stopped_at_ || HasStopped(), "not its stop");
    case Status::kFinishedLengthCapped:
      return Ensure(num_made() == LengthMax(), "not its length");
    case Status::kFinishedAborted:
      return Ensure(aborted_ || (request_.deadline && *request_.deadline <= now) ||
                        WouldSample(kNoProbability),
                    "aborted, and nobody knows why");
    case Status::kFinishedIgnored:
      return Ensure((num_prompt_tokens_ >= config_.SequenceTokensMax() ||
                     LongestWholePicture() > config_.max_num_batched_tokens) &&
                        num_made() == 0,
                    "its prompt would have fitted");
    case Status::kFinishedPreempted:
      return Ensure(config_.preemption == PreemptionPolicy::kStop, "stopped where it need not be");
    case Status::kFinishedVeFailed:
      return Ensure(vision_failed_, "its pictures were all right");
    case Status::kFinishedSoFailed:
      return Ensure(grammar_failed_ || WouldSample(kNothingAllowed), "its grammar was all right");
    default:
      Ensure(false, "an end that is none");
  }
}

bool Trip::WouldSample(TokenId token) {
  Board();
  return NextToken() == token;
}

}  // namespace airside::sim
