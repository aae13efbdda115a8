#pragma once

#include <cstdint>
#include <vector>

#include "engine/config.h"
#include "engine/draft_length.h"
#include "engine/sequence.h"

namespace airside {

// Draft tokens that one row can carry: the plan counts its sampled positions in a byte.
inline constexpr std::int32_t kDraftsPerRowMax = 254;

// Proposes what may follow a sequence's last known token, which the row that it is for computes.
class Drafter {
 public:
  explicit Drafter(const EngineConfig& config) : config_(config) {}

  // So many tokens of the sequence are being computed: looks at them as they come, since all of a
  // long prompt at once would hold the step up. Of output, sees whether a draft would be right.
  void Follow(Sequence& sequence, std::int32_t num_tokens) const;

  // Appends at most `room` draft tokens to `to`, as many as are worth verifying under this load.
  // The row must reach the end of the sequence, with nothing pending.
  void Propose(Sequence& sequence, std::int32_t room, const StepLoad& load,
               std::vector<TokenId>& to) const;

  // How many proposals the draft head should make after a row with so many drafts.
  std::int32_t NumWanted(const Sequence& sequence, std::int32_t num_pending) const;

  // Learns from what a row has made, and from how many of its drafts were right.
  void Learn(Sequence& sequence, std::int32_t num_verified, std::int32_t num_accepted) const;

 private:
  void ProposeGolden(const Sequence& sequence, std::int32_t count, std::vector<TokenId>& to) const;
  void ProposeByNgram(Sequence& sequence, std::int32_t count, const StepLoad& load,
                      std::vector<TokenId>& to) const;
  bool MayFollow(TokenId token) const;
  TokenId Spoil(TokenId token) const;

  const EngineConfig& config_;
};

}  // namespace airside
