#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/config.h"
#include "engine/types.h"

namespace airside {

// How the next token is drawn; handed through to the workers.
struct Sampling {
  float temperature = 1.0F;  // 0: the likeliest token
  std::int32_t top_k = 0;    // 0: off
  float top_p = 1.0F;
  float min_p = 0.0F;
  std::uint64_t seed = 0;
};

// What a front end asks for.
struct Request {
  ClientId client{};
  SeqId seq_id{};
  std::string request_id;
  std::vector<TokenId> token_ids;             // with one mark, the image token, per image
  std::vector<std::int32_t> image_positions;  // of the marks, increasing
  Seconds arrival = 0;
  std::int32_t priority = 0;  // smaller goes first
  std::optional<Seconds> deadline;
  std::optional<std::int64_t> max_tokens;  // none: whatever the context leaves
  std::int64_t min_tokens = 0;
  std::vector<TokenId> stop_token_ids;
  Sampling sampling;
};

enum class RejectionCode { kDuplicateId, kInvalid, kContextExceeded, kPoolExceeded, kQueueFull };

// "duplicate_id", "invalid", ...
std::string_view Name(RejectionCode code);

struct Rejection {
  RejectionCode code;
  std::string detail;
};

// What is wrong with the first token, if any, that the model does not know: its index and id, and
// the size of the vocabulary. `name` is what the tokens are called.
std::optional<std::string> FindStranger(std::string_view name, std::span<const TokenId> tokens,
                                        const EngineConfig& config);

// What is wrong with a request whatever else is going on. Of images only the marks are counted
// here, since their sizes are not known yet.
std::optional<Rejection> FindFault(const Request& request, const EngineConfig& config);

// Why a prompt of this many tokens can never run, if so.
std::optional<Rejection> FindMisfit(std::int64_t prompt_tokens, const EngineConfig& config);

}  // namespace airside
