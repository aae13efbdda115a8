#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "engine/request.h"
#include "engine/types.h"

namespace airside::sim {

// A hash of everything before a place in a sequence. It stands for what the model keeps of it, so a
// wrong block, token or picture shows in the next token.
using Digest = std::uint64_t;

inline constexpr TokenId kImageToken = 7;
inline constexpr TokenId kVocabulary = 40;

Digest Mix(Digest digest, std::uint64_t value);

// What the model knows of tokens [0, n).
struct Prefix {
  Digest digest = 0;
  TokenId last = 0;

  bool operator==(const Prefix&) const = default;
};

// Of no tokens. The salt is in it, so that a block shared past its salt shows.
Prefix StartPrefix(std::string_view salt);
Prefix Extend(Prefix before, TokenId token);
// By embedding `place` of the picture with this content, in an image token's place.
Prefix ExtendByPicture(Prefix before, std::uint64_t content, std::int32_t place);

// A hash of all that the rules of a request say.
Digest DigestRules(const LogitRules& rules);

// What a token adds to the digest of a history that rules look at, in any order.
Digest WeighToken(Digest rules, TokenId token);

// Everything that decides a token.
struct Draw {
  Prefix prefix;
  Digest state = 0;  // of fixed size; 0 where the model has none
  std::uint64_t seed = 0;
  std::int64_t position = 0;  // in the output
  std::span<const TokenId> banned = {};
  Digest history = 0;                  // 0 without rules
  std::optional<Digest> grammar = {};  // what it makes of the output so far
};

// The fake model: a token, or one that is none (see step_result.h). Two times in three it depends
// on the last token alone, so that what follows a run of tokens often follows it again.
TokenId Sample(const Draw& draw);

// What a log-probability record says of this token after this prefix, with k alternatives.
void AppendRecord(const Prefix& before, TokenId token, std::int32_t k,
                  std::vector<std::uint32_t>& to);

}  // namespace airside::sim
