#include "engine/request.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <stdexcept>
#include <utility>

namespace airside {
namespace {

std::optional<Rejection> Invalid(std::string detail) {
  return Rejection{RejectionCode::kInvalid, std::move(detail)};
}

std::optional<Rejection> NotFinite(std::string_view name) {
  return Invalid(std::string(name) + " is not a finite number");
}

std::optional<Rejection> FindLogitFault(const LogitRules& rules, const EngineConfig& config) {
  if (!std::isfinite(rules.repetition_penalty) || rules.repetition_penalty <= 0) {
    return Invalid("repetition_penalty is " + std::to_string(rules.repetition_penalty) +
                   ", but must be a finite number above 0");
  }
  if (!std::isfinite(rules.presence_penalty)) return NotFinite("presence_penalty");
  if (!std::isfinite(rules.frequency_penalty)) return NotFinite("frequency_penalty");
  for (const auto& [token, bias] : rules.bias) {
    if (!std::isfinite(bias)) return NotFinite("logit_bias[" + std::to_string(token) + "]");
    if (FindStranger("logit_bias", {&token, 1}, config)) {
      return Invalid("logit_bias names token " + std::to_string(token) +
                     ", but the model's token ids are in [0, " +
                     std::to_string(*config.vocab_size) + ")");
    }
  }
  if (auto fault = FindStranger("allowed_token_ids", rules.allowed, config)) {
    return Invalid(*fault);
  }
  return std::nullopt;
}

std::optional<Rejection> FindGoldenFault(const Request& request, const EngineConfig& config) {
  const Golden& golden = request.golden;
  if (golden.tokens.empty() != (golden.mode == GoldenMode::kNone)) {
    return Invalid(golden.tokens.empty() ? "golden_mode is set, but there are no golden_tokens"
                                         : "there are golden_tokens, but no golden_mode");
  }
  if (!(golden.acceptance >= 0 && golden.acceptance <= 1)) {
    return Invalid("golden_acceptance is " + std::to_string(golden.acceptance) +
                   ", but must be in [0, 1]");
  }
  if (auto fault = FindStranger("golden_tokens", golden.tokens, config)) return Invalid(*fault);
  // A negative one would be taken for a place in the step before, the image token for a picture.
  for (std::size_t i = 0; i < golden.tokens.size(); ++i) {
    if (golden.tokens[i] >= 0 && !config.StandsForImage(golden.tokens[i])) continue;
    return Invalid("golden_tokens[" + std::to_string(i) + "] is " +
                   std::to_string(golden.tokens[i]) + ", which no model makes");
  }
  if (golden.mode == GoldenMode::kForce && request.structured) {
    return Invalid("golden tokens cannot be forced on a structured output: leave one of them out");
  }
  return std::nullopt;
}

std::optional<Rejection> FindImageFault(const Request& request, const EngineConfig& config) {
  const auto& tokens = request.token_ids;
  const std::size_t num_images = request.image_positions.size();
  if (!request.image_hashes.empty() && request.image_hashes.size() != num_images) {
    return Invalid(std::to_string(request.image_hashes.size()) + " image_hashes for " +
                   std::to_string(num_images) + " images");
  }
  if (!config.image_token_id) {
    if (request.image_positions.empty()) return std::nullopt;
    return Invalid("the model takes no images");
  }
  const TokenId mark_id = *config.MarkId();
  const std::string mark =
      (config.image_mark_id ? "the image mark " : "the image token ") + std::to_string(mark_id);
  std::int64_t last = -1;
  for (const std::int32_t position : request.image_positions) {
    const std::string named = "image position " + std::to_string(position);
    if (position <= last) return Invalid(named + " is not after the one before it");
    if (static_cast<std::size_t>(position) >= tokens.size()) {
      return Invalid(named + " is outside the prompt of " + std::to_string(tokens.size()) +
                     " tokens");
    }
    if (tokens[position] != mark_id) {
      return Invalid(named + " holds token " + std::to_string(tokens[position]) + " and not " +
                     mark);
    }
    last = position;
  }
  const auto marks = std::count(tokens.begin(), tokens.end(), mark_id);
  if (static_cast<std::size_t>(marks) != request.image_positions.size()) {
    return Invalid("the prompt holds " + mark + " " + std::to_string(marks) + " times for " +
                   std::to_string(request.image_positions.size()) + " images");
  }
  if (mark_id == *config.image_token_id) return std::nullopt;
  const auto at = std::find(tokens.begin(), tokens.end(), *config.image_token_id);
  if (at == tokens.end()) return std::nullopt;
  return Invalid("token_ids[" + std::to_string(at - tokens.begin()) + "] is " +
                 std::to_string(*at) + ", which only images bring; write " + mark +
                 " in the place of an image");
}

}  // namespace

GoldenMode ParseGoldenMode(std::string_view name) {
  if (name.empty()) return GoldenMode::kNone;
  if (name == "force") return GoldenMode::kForce;
  if (name == "draft") return GoldenMode::kDraft;
  throw std::invalid_argument("golden_mode is \"" + std::string(name) +
                              "\", but must be \"force\", \"draft\" or empty");
}

std::string_view Name(RejectionCode code) {
  switch (code) {
    case RejectionCode::kDuplicateId:
      return "duplicate_id";
    case RejectionCode::kInvalid:
      return "invalid";
    case RejectionCode::kContextExceeded:
      return "context_exceeded";
    case RejectionCode::kPoolExceeded:
      return "pool_exceeded";
    case RejectionCode::kQueueFull:
      return "queue_full";
  }
  return "";
}

std::optional<std::string> FindStranger(std::string_view name, std::span<const TokenId> tokens,
                                        const EngineConfig& config) {
  if (!config.vocab_size) return std::nullopt;
  const auto is_strange = [size = *config.vocab_size](TokenId id) { return id < 0 || id >= size; };
  const auto at = std::find_if(tokens.begin(), tokens.end(), is_strange);
  if (at == tokens.end()) return std::nullopt;
  return std::string(name) + "[" + std::to_string(at - tokens.begin()) + "] is " +
         std::to_string(*at) + ", but the model's token ids are in [0, " +
         std::to_string(*config.vocab_size) + ")";
}

std::optional<Rejection> FindFault(const Request& request, const EngineConfig& config) {
  if (request.token_ids.empty()) return Invalid("the prompt has no tokens");
  // One of them would fail the step, and with it every group of workers that is given it again.
  if (auto fault = FindStranger("token_ids", request.token_ids, config)) return Invalid(*fault);
  if (auto fault = FindStranger("stop_token_ids", request.stop_token_ids, config)) {
    return Invalid(*fault);
  }
  if (request.max_tokens && *request.max_tokens < 1) {
    return Invalid("max_tokens is " + std::to_string(*request.max_tokens) +
                   ", but must be at least 1");
  }
  if (request.min_tokens < 0) {
    return Invalid("min_tokens is " + std::to_string(request.min_tokens) +
                   ", but must not be negative");
  }
  // The order of sequences compares times, and NaN has no place in an order.
  if (!std::isfinite(request.arrival)) return Invalid("arrival is not a finite time");
  if (request.deadline && !std::isfinite(*request.deadline)) {
    return Invalid("deadline is not a finite time");
  }
  if (request.drafts_max && *request.drafts_max < 0) {
    return Invalid("drafts_max is " + std::to_string(*request.drafts_max) +
                   ", but must not be negative");
  }
  for (const auto& [name, alternatives] : {std::pair{"logprobs", request.logprobs},
                                           std::pair{"prompt_logprobs", request.prompt_logprobs}}) {
    if (alternatives >= -1) continue;
    return Invalid(std::string(name) + " is " + std::to_string(alternatives) +
                   ", but must be at least 0, or -1 for none");
  }
  if (auto fault = FindLogitFault(request.logit_rules, config)) return fault;
  if (auto fault = FindGoldenFault(request, config)) return fault;
  if (auto fault = FindImageFault(request, config)) return fault;
  return FindMisfit(static_cast<std::int64_t>(request.token_ids.size()), config);
}

std::optional<Rejection> FindMisfit(std::int64_t prompt_tokens, const EngineConfig& config) {
  const std::string prompt = "the prompt has " + std::to_string(prompt_tokens) + " tokens, but ";
  if (prompt_tokens > config.max_model_len - 1) {
    return Rejection{RejectionCode::kContextExceeded,
                     prompt + "the context of " + std::to_string(config.max_model_len) +
                         " tokens leaves room for " + std::to_string(config.max_model_len - 1)};
  }
  if (prompt_tokens + 1 > config.PoolTokens()) {
    return Rejection{RejectionCode::kPoolExceeded,
                     prompt + "the KV pool of " + std::to_string(config.PoolTokens()) +
                         " tokens leaves room for " + std::to_string(config.PoolTokens() - 1)};
  }
  return std::nullopt;
}

}  // namespace airside
