#include "engine/sim/draws.h"

#include <algorithm>
#include <cstddef>

namespace airside::sim {
namespace {

constexpr std::size_t kStemsMax = 6;
constexpr int kContents = 4;  // different pictures with a hash

ImageHash HashOf(int content) { return {static_cast<std::uint8_t>(content)}; }

}  // namespace

EngineConfig DrawConfig(Dice& dice) {
  EngineConfig config;
  config.num_blocks = dice.Chance(20) ? dice.Draw(1, 6) : dice.Draw(7, 24);
  config.block_size = dice.Draw(1, 6);
  config.max_num_seqs = dice.Draw(1, 6);
  config.max_num_batched_tokens = dice.Draw(1, 24);
  config.max_model_len = dice.Chance(20) ? dice.Draw(2, 16) : dice.Draw(17, 64);
  config.enable_chunked_prefill = dice.Chance(70);
  config.prefill_first = dice.Chance(30);
  config.strict_fifo = dice.Chance(30);
  config.preemption = dice.Chance(70) ? PreemptionPolicy::kRecompute : PreemptionPolicy::kStop;
  config.victim_rule = VictimRule{dice.Draw(0, 2)};
  config.enable_prefix_caching = dice.Chance(70);
  config.async_scheduling = dice.Chance(70);
  config.draft_method = DraftMethod{dice.Draw(0, 2)};
  const bool has_drafts = config.draft_method != DraftMethod::kNone || dice.Chance(50);
  config.max_draft_tokens = has_drafts ? dice.Draw(1, 5) : 0;
  if (dice.Chance(30)) config.num_state_slots = dice.Draw(1, 8);
  config.tail_tokens = dice.Chance(50) ? 0 : dice.Draw(1, 3);
  if (dice.Chance(70)) config.image_token_id = kImageToken;
  config.atomic_images = dice.Chance(40);
  config.max_queued_requests = dice.Draw(1, 20);
  config.max_queued_tokens = dice.Draw(20, 500);
  // By dice of its own: what is drawn for the seeds of past failures stays as it was, and the two
  // that there are have no such limit, or no step that it counts in.
  Dice later(static_cast<std::uint64_t>(config.max_queued_tokens));
  config.max_num_mixed_tokens = later.Chance(50) ? 0 : later.Draw(1, 24);
  return config;
}

Request RequestDraw::Next(SeqId seq_id, Seconds now) {
  static const char* const kUsers[] = {"", "ann", "bob", "cid"};
  Request request;
  request.seq_id = seq_id;
  request.client = ClientId{dice_.Draw(0, 2)};
  request.user = kUsers[dice_.Chance(50) ? 0 : dice_.Draw(1, 3)];
  if (dice_.Chance(15)) request.cache_salt = "salt";
  DrawTokens(request);
  DrawPictures(request);
  DrawLimits(request, now);
  DrawRules(request);
  DrawGolden(request);
  return request;
}

void RequestDraw::DrawTokens(Request& request) {
  auto& tokens = request.token_ids;
  if (!stems_.empty() && dice_.Chance(50)) {
    tokens = stems_[dice_.Draw(0, static_cast<int>(stems_.size()) - 1)];
    if (dice_.Chance(40)) return;
    tokens.resize(dice_.Draw(0, static_cast<int>(tokens.size())));
  }
  // Now and then one that does not fit.
  const auto fitting = static_cast<int>(config_.SequenceTokensMax()) - 1;
  const int length = dice_.Draw(1, dice_.Chance(5) ? fitting + 2 : std::clamp(fitting - 4, 1, 24));
  while (static_cast<int>(tokens.size()) < length) {
    const bool is_picture = config_.image_token_id && dice_.Chance(6);
    tokens.push_back(is_picture ? kImageToken : dice_.Draw(8, kVocabulary - 1));
  }
  if (stems_.size() == kStemsMax) stems_.erase(stems_.begin());
  stems_.push_back(tokens);
}

void RequestDraw::DrawPictures(Request& request) {
  for (std::size_t i = 0; i < request.token_ids.size(); ++i) {
    if (request.token_ids[i] != kImageToken) continue;
    request.image_positions.push_back(static_cast<std::int32_t>(i));
  }
  if (dice_.Chance(30)) return;
  for (std::size_t i = 0; i < request.image_positions.size(); ++i) {
    request.image_hashes.push_back(HashOf(dice_.Draw(1, kContents)));
  }
}

ImageShape RequestDraw::DrawShape(std::uint64_t content) {
  Dice of_content(content);
  ImageShape shape;
  const int num_tokens = of_content.Draw(1, 8);
  bool is_seen = false;
  for (int i = 0; i < num_tokens; ++i) {
    shape.expansion.push_back(of_content.Chance(70) ? kImageToken : of_content.Draw(8, 12));
    is_seen |= shape.expansion.back() == kImageToken;
  }
  if (is_seen && of_content.Chance(70)) shape.rope_advance = of_content.Draw(1, num_tokens);
  return shape;
}

std::vector<Picture> RequestDraw::PicturesOf(const Request& request) {
  std::vector<Picture> pictures;
  for (std::size_t i = 0; i < request.image_positions.size(); ++i) {
    const bool has_hash = !request.image_hashes.empty();
    Picture picture;
    picture.content = has_hash ? (*request.image_hashes[i])[0] : 1000 + num_pictures_++;
    picture.is_fetched = has_hash && (static_cast<std::uint64_t>(request.seq_id) + i) % 3 == 0;
    picture.shape = DrawShape(picture.content);
    if (picture.is_fetched) picture.shape.content = request.image_hashes[i];
    pictures.push_back(std::move(picture));
  }
  return pictures;
}

void RequestDraw::DrawLimits(Request& request, Seconds now) {
  request.arrival = now - dice_.Draw(0, 2);
  request.priority = dice_.Chance(80) ? 0 : dice_.Draw(-1, 1);
  if (dice_.Chance(15)) request.deadline = now + dice_.Draw(0, 40);
  if (dice_.Chance(80)) request.max_tokens = dice_.Draw(1, 16);
  request.min_tokens = dice_.Chance(20) ? dice_.Draw(1, 6) : 0;
  for (int i = dice_.Draw(0, 2); i > 0; --i) request.stop_token_ids.push_back(dice_.Draw(0, 9));
}

void RequestDraw::DrawRules(Request& request) {
  request.sampling.seed = static_cast<std::uint64_t>(dice_.Draw(0, 3));
  LogitRules& rules = request.logit_rules;
  if (dice_.Chance(10)) rules.repetition_penalty = 1.5F;
  if (dice_.Chance(5)) rules.presence_penalty = 0.5F;
  if (dice_.Chance(5)) rules.frequency_penalty = 0.25F;
  if (dice_.Chance(5)) rules.bias[dice_.Draw(8, 20)] = -3.0F;
  if (dice_.Chance(5)) rules.allowed = {8, 9, 10, 11};
  if (dice_.Chance(20)) request.logprobs = dice_.Draw(0, 2);
  if (dice_.Chance(10)) request.prompt_logprobs = dice_.Draw(0, 2);
  request.structured = dice_.Chance(15);
  if (dice_.Chance(20)) request.drafts_max = dice_.Draw(0, 3);
}

void RequestDraw::DrawGolden(Request& request) {
  if (request.structured || !dice_.Chance(15)) return;
  request.golden.mode = dice_.Chance(50) ? GoldenMode::kForce : GoldenMode::kDraft;
  request.golden.acceptance = dice_.Draw(0, 4) * 0.25;
  request.golden.tokens.resize(dice_.Draw(1, 12));
  for (TokenId& token : request.golden.tokens) token = dice_.Draw(8, kVocabulary - 1);
}

}  // namespace airside::sim
