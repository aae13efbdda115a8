#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "engine/config.h"
#include "engine/outbox.h"
#include "engine/sequence.h"
#include "engine/status.h"
#include "engine/types.h"

namespace airside {

// How a sequence ends: a final status, and which of its causes it was.
struct Ending {
  Status status;
  std::string detail;
};

// The stop check: whether the token made last is the end. A stop token is part of the output.
std::optional<Ending> FindEnding(const Sequence& sequence, const EngineConfig& config);

// The end of a sequence whose next token is none; see step_result.h.
Ending EndingWithout(TokenId sampled);

// What its client is told of a sequence that has ended now; of its output, so many tokens count.
Finish MakeFinish(const Sequence& sequence, std::int64_t completion_tokens, std::string detail,
                  Seconds now);

}  // namespace airside
