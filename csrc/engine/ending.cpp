#include "engine/ending.h"

#include <algorithm>
#include <cstddef>
#include <string_view>
#include <utility>

#include "engine/step_result.h"

namespace airside {
namespace {

std::string DescribeLimit(const Sequence& sequence, const EngineConfig& config) {
  if (sequence.NumMade() >= sequence.generation.tokens_max) {
    return "max_tokens " + std::to_string(sequence.generation.tokens_max);
  }
  if (sequence.Length() >= config.max_model_len) {
    return "the context of " + std::to_string(config.max_model_len) + " tokens is full";
  }
  return "the KV pool of " + std::to_string(config.PoolTokens()) + " tokens is full";
}

// What a sequence without a token waits for; pixels first, since the text before them may be done.
std::string_view StageOf(const Sequence& sequence) {
  if (sequence.output.first_token) return "decode";
  const auto& images = sequence.input.images;
  const bool is_seeing = std::all_of(images.begin(), images.end(), [](const Image& image) {
    return image.state == Image::State::kReady;
  });
  if (!is_seeing) return "images";
  return sequence.output.first_scheduled ? "prefill" : "queue";
}

}  // namespace

std::optional<Ending> FindEnding(const Sequence& sequence, const EngineConfig& config) {
  const Sequence::Generation& generation = sequence.generation;
  const TokenId token = sequence.output.tokens.back();
  const auto& stops = generation.stop_token_ids;
  // It was not banned only if enough had been made before it.
  if (sequence.NumMade() > generation.tokens_min &&
      std::find(stops.begin(), stops.end(), token) != stops.end()) {
    return Ending{Status::kFinishedStopped, "token " + std::to_string(token)};
  }
  if (sequence.NumMade() >= generation.tokens_max || sequence.Length() >= generation.length_max) {
    return Ending{Status::kFinishedLengthCapped, DescribeLimit(sequence, config)};
  }
  const Golden& golden = sequence.draft.golden;
  if (golden.mode == GoldenMode::kForce &&
      static_cast<std::size_t>(sequence.NumMade()) >= golden.tokens.size()) {
    return Ending{Status::kFinishedStopped, "the golden tokens are all there"};
  }
  return std::nullopt;
}

// Not computed again: what gave no token would most likely do so again, for ever.
Ending EndingWithout(TokenId sampled) {
  if (sampled == kNothingAllowed) {
    return {Status::kFinishedSoFailed, "no token continues the grammar"};
  }
  return {Status::kFinishedAborted, "the model failed: its logits gave no token a probability"};
}

Finish MakeFinish(const Sequence& sequence, std::int64_t completion_tokens, std::string detail,
                  Seconds now) {
  const Sequence::Output& output = sequence.output;
  // Front ends stamp arrivals with their own clocks, which may be a little ahead.
  const auto since = [](Seconds from, std::optional<Seconds> until) {
    return until ? std::max(*until - from, 0.0) : 0.0;
  };
  const Seconds arrival = sequence.request.arrival;
  const auto& preempted_at = sequence.schedule.preempted_at;
  return {.seq_id = sequence.request.id,
          .status = sequence.status(),
          .detail = std::move(detail),
          .prompt_tokens = sequence.PromptLength(),
          .image_tokens = sequence.NumImageTokens(),
          .completion_tokens = completion_tokens,
          .preemptions = output.num_preemptions,
          .queued_s = since(arrival, output.first_scheduled.value_or(now)),
          .time_to_first_token_s = since(arrival, output.first_token),
          .decode_s = output.first_token ? since(*output.first_token, now) : 0,
          .cached_tokens = output.num_cached,
          .draft_tokens = sequence.draft.num_verified,
          .accepted_tokens = sequence.draft.num_accepted,
          .vision_wait_s = since(arrival, output.pixels_in),
          .prefill_s = output.first_token ? since(*output.first_scheduled, output.first_token) : 0,
          .preempted_s = output.preempted_s + (preempted_at ? since(*preempted_at, now) : 0),
          .stage = StageOf(sequence)};
}

}  // namespace airside
