#pragma once

#include <cstdint>
#include <map>
#include <string>
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
};

// News for one client. Row i: sequence seq_ids[i] made the next num_tokens[i] of token_ids.
struct ClientOutput {
  ClientId client;
  std::vector<SeqId> seq_ids;
  std::vector<std::int32_t> num_tokens;
  std::vector<TokenId> token_ids;
  std::vector<Finish> finished;
};

// Collects what clients must be told until somebody takes it.
class Outbox {
 public:
  void AddToken(ClientId client, SeqId seq_id, TokenId token);
  void AddFinish(ClientId client, Finish finish);

  // Everything since the last time, by client, the smallest first.
  std::vector<ClientOutput> Take();

 private:
  ClientOutput& Of(ClientId client);

  std::map<ClientId, ClientOutput> outputs_;
};

}  // namespace airside
