#pragma once

#include <array>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "engine/types.h"

namespace airside {

// The tokens of one sequence, with where each run of a few of them ended last: drafts by prompt
// lookup. O(1) per token; one entry per token and length of run.
class NgramIndex {
 public:
  static constexpr int kShortest = 2;
  static constexpr int kLongest = 4;

  void Append(TokenId token);

  // What followed the latest earlier occurrence of the last tokens, the longest run that has one;
  // where that reaches the end of what is known, as if it went round. At most `count` tokens; none
  // if no run has occurred before.
  std::vector<TokenId> Propose(int count) const;

  std::int32_t num_tokens() const { return static_cast<std::int32_t>(tokens_.size()); }

 private:
  std::uint64_t HashRun(std::int32_t end, int length) const;
  bool SameRun(std::int32_t end, std::int32_t other_end, int length) const;

  std::vector<TokenId> tokens_;
  // By length and hash: the end of its latest occurrence but for one at the very end.
  std::array<std::unordered_map<std::uint64_t, std::int32_t>, kLongest - kShortest + 1> ends_;
};

}  // namespace airside
