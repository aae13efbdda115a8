#include "engine/drafter.h"

#include <algorithm>
#include <cstddef>
#include <span>

#include "engine/ensure.h"
#include "engine/scramble.h"

namespace airside {
namespace {

// Of moving averages over tokens.
constexpr float kStep = 0.1F;
// Acceptance never gets so low that drafts are not tried where they cost next to nothing.
constexpr float kAcceptanceMin = 0.1F;
constexpr float kAcceptanceMax = 0.98F;

// A number in [0, 1) that depends on the place alone.
double Uniform(std::uint64_t seed, std::uint64_t position) {
  return static_cast<double>(Scramble(Scramble(seed) + position) >> 11) * 0x1.0p-53;
}

// The model has made this token, whether a draft stood there or not: so it is known what drafts
// would bring also while none are verified.
void Judge(Sequence::Draft& draft, TokenId made) {
  const std::vector<TokenId> expected = draft.ngrams.Propose(1);
  const float right = !expected.empty() && expected.front() == made ? 1.0F : 0.0F;
  draft.benefit += kStep * (right - draft.benefit);
  if (expected.empty()) return;
  draft.acceptance += kStep * (right - draft.acceptance);
  draft.acceptance = std::clamp(draft.acceptance, kAcceptanceMin, kAcceptanceMax);
}

}  // namespace

void Drafter::Follow(Sequence& sequence, std::int32_t num_tokens) const {
  if (config_.draft_method != DraftMethod::kNgram) return;
  Sequence::Draft& draft = sequence.draft;
  if (draft.golden.mode != GoldenMode::kNone || draft.tokens_max == 0) return;
  std::vector<TokenId> news;
  sequence.AppendTokens(draft.ngrams.num_tokens(), std::max(num_tokens, draft.ngrams.num_tokens()),
                        news);
  for (const TokenId token : news) {
    if (draft.ngrams.num_tokens() >= sequence.PromptLength()) Judge(draft, token);
    draft.ngrams.Append(token);
  }
}

void Drafter::Propose(Sequence& sequence, std::int32_t room, const StepLoad& load,
                      std::vector<TokenId>& to) const {
  Ensure(sequence.schedule.num_pending == 0, "drafts for what is not known yet");
  const Sequence::Generation& generation = sequence.generation;
  const Sequence::Draft& draft = sequence.draft;
  // The row makes one token more than it carries drafts.
  const std::int64_t output_left = generation.tokens_max - sequence.NumMade() - 1;
  const std::int64_t length_left = generation.length_max - sequence.Length() - 1;
  const auto count = static_cast<std::int32_t>(
      std::min({std::int64_t{room}, std::int64_t{kDraftsPerRowMax}, output_left, length_left,
                std::int64_t{draft.tokens_max}}));
  if (count <= 0) return;

  if (draft.golden.mode != GoldenMode::kNone) {
    ProposeGolden(sequence, count, to);
  } else if (config_.draft_method == DraftMethod::kNgram) {
    ProposeByNgram(sequence, count, load, to);
  } else {
    const auto proposed = std::min(static_cast<std::size_t>(count), draft.proposed.size());
    const auto worth = DraftLength(std::span(draft.confidences).first(proposed), load);
    for (int i = 0; i < worth && MayFollow(draft.proposed[i]); ++i) to.push_back(draft.proposed[i]);
  }
}

// Of a forced output the last token is sampled, not computed; of one that is offered as drafts all
// may be computed.
void Drafter::ProposeGolden(const Sequence& sequence, std::int32_t count,
                            std::vector<TokenId>& to) const {
  const Golden& golden = sequence.draft.golden;
  const bool forced = golden.mode == GoldenMode::kForce;
  const auto num_golden = static_cast<std::int32_t>(golden.tokens.size()) - (forced ? 1 : 0);
  const std::int32_t begin = sequence.NumMade();
  for (std::int32_t i = begin; i < std::min(begin + count, num_golden); ++i) {
    const TokenId token = golden.tokens[i];
    const bool spoilt = !forced && Uniform(sequence.generation.sampling.seed,
                                           static_cast<std::uint64_t>(i)) >= golden.acceptance;
    to.push_back(spoilt ? Spoil(token) : token);
  }
}

void Drafter::ProposeByNgram(Sequence& sequence, std::int32_t count, const StepLoad& load,
                             std::vector<TokenId>& to) const {
  Follow(sequence, sequence.Length());
  const std::vector<float> confidences(count, sequence.draft.acceptance);
  const int worth = DraftLength(confidences, load);
  if (worth == 0) return;
  for (const TokenId token : sequence.draft.ngrams.Propose(worth)) {
    if (!MayFollow(token)) return;
    to.push_back(token);
  }
}

std::int32_t Drafter::NumWanted(const Sequence& sequence, std::int32_t num_pending) const {
  if (config_.draft_method != DraftMethod::kMtp) return 0;
  if (sequence.draft.golden.mode != GoldenMode::kNone) return 0;
  // At least one more is made now, and the row that verifies them makes one more than they are.
  const std::int64_t made = sequence.NumMade() + num_pending;
  const std::int64_t length = sequence.Length() + num_pending;
  const std::int64_t most =
      std::min({std::int64_t{sequence.draft.tokens_max}, sequence.generation.tokens_max - made - 1,
                sequence.generation.length_max - length - 1});
  return static_cast<std::int32_t>(std::max<std::int64_t>(most, 0));
}

void Drafter::Learn(Sequence& sequence, std::int32_t num_verified,
                    std::int32_t num_accepted) const {
  sequence.draft.num_verified += num_verified;
  sequence.draft.num_accepted += num_accepted;
  Follow(sequence, sequence.Length());
}

// A picture's token would be taken for a picture, a negative one for a place in the step before.
bool Drafter::MayFollow(TokenId token) const {
  if (token < 0 || config_.StandsForImage(token)) return false;
  return !config_.vocab_size || token < *config_.vocab_size;
}

// Another token than this one, if the model has another.
TokenId Drafter::Spoil(TokenId token) const {
  for (const TokenId other : {token ^ 1, token ^ 2, token ^ 3}) {
    if (MayFollow(other)) return other;
  }
  return token;
}

}  // namespace airside
