#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/status.h"
#include "engine/types.h"

namespace airside {

// The one end of one sequence.
struct Finish {
  SeqId seq_id;
  Status status;
  std::string detail;
  std::int64_t prompt_tokens;  // with images expanded, if all of their shapes were known
  std::int64_t image_tokens;   // of those, the ones that came from expansions
  std::int64_t completion_tokens;
  std::int64_t preemptions;
  Seconds queued_s;
  Seconds time_to_first_token_s;  // 0: there was none
  Seconds decode_s;               // likewise
  std::int64_t cached_tokens;     // of the prompt, found in the prefix cache at the first admission
  std::int64_t draft_tokens;      // verified
  std::int64_t accepted_tokens;
  Seconds vision_wait_s;  // from arrival until all pixels were in; 0: there are none
  Seconds prefill_s;      // from the first step to the first token; 0: there was none
  Seconds preempted_s;    // from losing its blocks, to others or with the workers, to its next step
  std::string_view stage;  // what it was at: "images", "queue", "prefill" or "decode"
};

// News for one client. Row i: sequence seq_ids[i] made the next num_tokens[i] of token_ids.
struct ClientOutput {
  ClientId client;
  std::vector<SeqId> seq_ids = {};
  std::vector<std::int32_t> num_tokens = {};
  std::vector<TokenId> token_ids = {};
  std::vector<Finish> finished = {};
  std::int32_t step_tokens = 0;  // computed, over all sequences, in the latest step
  // Log-probability records: bytes of each row's, one record per token; no sizes: nobody has any.
  std::vector<std::int32_t> logprob_sizes = {};
  std::vector<std::byte> logprobs = {};
  // And those of further prompt positions.
  std::vector<SeqId> prompt_seq_ids = {};
  std::vector<std::int32_t> prompt_sizes = {};
  std::vector<std::byte> prompt_logprobs = {};
};

// Collects what clients must be told until somebody takes it.
class Outbox {
 public:
  // What follows comes of a step with so many tokens.
  void BeginStep(std::int32_t step_tokens) { step_tokens_ = step_tokens; }

  // A sequence's new tokens, and their records if it wants any.
  void AddTokens(ClientId client, SeqId seq_id, std::span<const TokenId> tokens,
                 std::span<const std::byte> records);
  // Records of a sequence's next prompt positions.
  void AddPromptLogprobs(ClientId client, SeqId seq_id, std::span<const std::byte> records);
  void AddFinish(ClientId client, Finish finish);

  // Everything since the last time, by client, the smallest first.
  std::vector<ClientOutput> Take();

 private:
  ClientOutput& Of(ClientId client);

  std::map<ClientId, ClientOutput> outputs_;
  std::int32_t step_tokens_ = 0;
};

}  // namespace airside
