#include "engine/sim/fake_model.h"

#include <algorithm>
#include <bit>

#include "engine/step_result.h"

namespace airside::sim {

Digest Mix(Digest digest, std::uint64_t value) {
  digest = (digest ^ (value + 0x9E3779B97F4A7C15ULL + (digest << 6))) * 0xBF58476D1CE4E5B9ULL;
  return digest ^ (digest >> 29);
}

Prefix StartPrefix(std::string_view salt) {
  Digest digest = 1;
  for (const char character : salt) digest = Mix(digest, static_cast<unsigned char>(character));
  return {digest, 0};
}

Prefix Extend(Prefix before, TokenId token) {
  return {Mix(before.digest, static_cast<std::uint64_t>(token)), token};
}

Prefix ExtendByPicture(Prefix before, std::uint64_t content, std::int32_t place) {
  return {Mix(Mix(before.digest, content + 1'000'000), static_cast<std::uint64_t>(place)),
          kImageToken};
}

Digest DigestRules(const LogitRules& rules) {
  Digest digest = 2;
  for (const float value :
       {rules.repetition_penalty, rules.presence_penalty, rules.frequency_penalty}) {
    digest = Mix(digest, std::bit_cast<std::uint32_t>(value));
  }
  for (const auto& [token, bias] : rules.bias) {
    digest =
        Mix(Mix(digest, static_cast<std::uint64_t>(token)), std::bit_cast<std::uint32_t>(bias));
  }
  for (const TokenId token : rules.allowed) digest = Mix(digest, static_cast<std::uint64_t>(token));
  return digest;
}

Digest WeighToken(Digest rules, TokenId token) {
  return Mix(rules, static_cast<std::uint64_t>(token) + 77);
}

TokenId Sample(const Draw& draw) {
  Digest dice = Mix(Mix(draw.prefix.digest, draw.state), draw.history);
  dice = Mix(Mix(dice, draw.seed), static_cast<std::uint64_t>(draw.position));
  if (draw.grammar && Mix(*draw.grammar, dice) % 300 == 0) return kNothingAllowed;
  if (Mix(dice, 0xBAD) % 2000 == 0) return kNoProbability;
  const auto is_out = [&](TokenId token) {
    if (std::find(draw.banned.begin(), draw.banned.end(), token) != draw.banned.end()) return true;
    return draw.grammar && Mix(*draw.grammar, static_cast<std::uint64_t>(token)) % 4 == 0;
  };
  TokenId token = dice % 3 == 0 ? static_cast<TokenId>((dice >> 8) % kVocabulary)
                                : (draw.prefix.last * 5 + 3) % kVocabulary;
  for (TokenId tried = 0; is_out(token); ++tried) {
    if (tried == kVocabulary) return kNoProbability;
    token = (token + 1) % kVocabulary;
  }
  return token;
}

void AppendRecord(const Prefix& before, TokenId token, std::int32_t k,
                  std::vector<std::uint32_t>& to) {
  to.push_back(static_cast<std::uint32_t>(before.digest));
  to.push_back(static_cast<std::uint32_t>(token));
  for (std::int32_t i = 0; i < 2 + 2 * k; ++i) {
    to.push_back(static_cast<std::uint32_t>(Mix(before.digest, static_cast<std::uint64_t>(i))));
  }
}

}  // namespace airside::sim
