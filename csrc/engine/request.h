#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/config.h"
#include "engine/types.h"

namespace airside {

// How the next token is drawn; handed through to the workers with each row that samples.
struct Sampling {
  float temperature = 1.0F;  // 0: the likeliest token
  std::int32_t top_k = 0;    // 0: off
  float top_p = 1.0F;
  float min_p = 0.0F;
  std::uint64_t seed = 0;
};

// What is done to the logits before that; told to the workers once, when the sequence is opened.
struct LogitRules {
  float repetition_penalty = 1.0F;
  float presence_penalty = 0.0F;
  float frequency_penalty = 0.0F;
  std::map<TokenId, float> bias;
  std::vector<TokenId> allowed;  // empty: all

  // Whether there is nothing to do.
  bool Empty() const {
    return repetition_penalty == 1.0F && presence_penalty == 0.0F && frequency_penalty == 0.0F &&
           bias.empty() && allowed.empty();
  }
};

// What is done with a given output.
enum class GoldenMode {
  kNone,   // there is none
  kForce,  // it becomes the output, whatever the model would choose
  kDraft,  // its tokens are offered as draft tokens
};

// "", "force" or "draft"; throws std::invalid_argument on anything else.
GoldenMode ParseGoldenMode(std::string_view name);

struct Golden {
  std::vector<TokenId> tokens;
  GoldenMode mode = GoldenMode::kNone;
  double acceptance = 1.0;  // the share of drafts that is left unspoilt
};

// Content of a picture and everything that decides what becomes of it.
using ImageHash = std::array<std::uint8_t, 16>;

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
  std::string user;        // users get equal shares
  std::string cache_salt;  // blocks are shared among requests of the same salt
  // One per image, none where it comes with the shape, or never: such a picture is shared with
  // nobody. Empty: none of all.
  std::vector<std::optional<ImageHash>> image_hashes;
  LogitRules logit_rules;
  std::int32_t logprobs = -1;         // alternatives with each token's log-probability; -1: none
  std::int32_t prompt_logprobs = -1;  // likewise for the prompt
  bool structured = false;            // a grammar, kept by the workers, restricts the output
  std::optional<std::int32_t> drafts_max;  // per step; none: as the engine is configured
  Golden golden;
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
