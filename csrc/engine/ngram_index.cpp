#include "engine/ngram_index.h"

#include <algorithm>

namespace airside {

std::uint64_t NgramIndex::HashRun(std::int32_t end, int length) const {
  std::uint64_t hash = 0;
  for (std::int32_t i = end - length; i < end; ++i) {
    hash = (hash ^ static_cast<std::uint32_t>(tokens_[i])) * 0x9E3779B97F4A7C15ULL;
    hash ^= hash >> 32;
  }
  return hash;
}

bool NgramIndex::SameRun(std::int32_t end, std::int32_t other_end, int length) const {
  const auto last = tokens_.begin() + end;
  return std::equal(last - length, last, tokens_.begin() + other_end - length);
}

void NgramIndex::Append(TokenId token) {
  // Only now do the runs that ended at the end have something that followed them.
  const std::int32_t end = num_tokens();
  for (int length = kShortest; length <= kLongest && length <= end; ++length) {
    ends_[length - kShortest][HashRun(end, length)] = end;
  }
  tokens_.push_back(token);
}

std::vector<TokenId> NgramIndex::Propose(int count) const {
  const std::int32_t end = num_tokens();
  for (int length = std::min<int>(kLongest, end); length >= kShortest; --length) {
    const auto& ends = ends_[length - kShortest];
    const auto at = ends.find(HashRun(end, length));
    if (at == ends.end() || !SameRun(end, at->second, length)) continue;
    std::vector<TokenId> proposed;
    proposed.reserve(std::max(count, 0));
    for (std::int32_t i = at->second; static_cast<int>(proposed.size()) < count; ++i) {
      proposed.push_back(i < end ? tokens_[i] : proposed[i - end]);
    }
    return proposed;
  }
  return {};
}

}  // namespace airside
