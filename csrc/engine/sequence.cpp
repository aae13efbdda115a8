#include "engine/sequence.h"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <utility>

#include "engine/ensure.h"
#include "engine/scramble.h"

namespace airside {
namespace {

std::int32_t DraftTokensMax(const Request& request, const EngineConfig& config) {
  // What is forced is no guess: it fills what the step leaves.
  if (request.golden.mode == GoldenMode::kForce) return std::numeric_limits<std::int32_t>::max();
  const bool has_drafter =
      request.golden.mode == GoldenMode::kDraft || config.draft_method != DraftMethod::kNone;
  if (!has_drafter) return 0;
  return std::min(request.drafts_max.value_or(config.max_draft_tokens), config.max_draft_tokens);
}

}  // namespace

bool Sequence::ShapesKnown() const {
  return std::all_of(input.images.begin(), input.images.end(),
                     [](const Image& image) { return image.state != Image::State::kShapeUnknown; });
}

std::int32_t Sequence::ReadyLength(bool as_if_encoded) const {
  // Computing the last token samples the next one, for which the grammar is needed.
  const bool lacks_grammar = structured.wanted && !structured.grammar_ready;
  const std::int32_t all = lacks_grammar ? WholeImagesEnd(VirtualLength() - 1) : VirtualLength();
  if (input.images.empty()) return all;
  if (!ShapesKnown()) return 0;
  for (const Image& image : input.images) {
    if (image.state == Image::State::kPixelsPending) return std::min(image.begin, all);
    if (image.WaitsForEncoder() && !as_if_encoded) return std::min(image.embeds_begin, all);
  }
  return all;
}

std::int32_t Sequence::WholeImagesEnd(std::int32_t end) const {
  if (!input.atomic_token || end >= PromptLength()) return end;
  const auto is_part = [&](std::int32_t place) {
    return input.prompt[place] == input.atomic_token;
  };
  for (const Image& image : input.images) {
    if (end <= image.begin || image.end <= end || !is_part(end)) continue;
    while (end > image.begin && is_part(end - 1)) --end;
    return end;
  }
  return end;
}

std::int32_t Sequence::LongestWholeImage() const {
  std::int32_t longest = 0;
  for (const Image& image : input.images) {
    std::int32_t length = 0;
    for (std::int32_t place = image.begin; input.atomic_token && place < image.end; ++place) {
      length = input.prompt[place] == input.atomic_token ? length + 1 : 0;
      longest = std::max(longest, length);
    }
  }
  return longest;
}

bool Sequence::TakesDrafts() const {
  if (draft.tokens_max == 0 || draft.benefit < Draft::kBenefitMin) return false;
  return draft.golden.mode == GoldenMode::kNone ||
         static_cast<std::size_t>(NumMade()) < draft.golden.tokens.size();
}

std::int32_t Sequence::NumImageTokens() const {
  if (!ShapesKnown()) return 0;
  std::int32_t total = 0;
  for (const Image& image : input.images) total += image.end - image.begin;
  return total;
}

std::int32_t Sequence::PositionShift(std::int32_t position) const {
  std::int32_t shift = 0;
  for (const Image& image : input.images) {
    if (image.end <= position) shift += image.position_shift;
  }
  return shift;
}

void Sequence::AppendTokens(std::int32_t begin, std::int32_t end, std::vector<TokenId>& to) const {
  Ensure(0 <= begin && begin <= end && end <= Length(), "tokens outside of the sequence");
  const std::int32_t prompt_end = PromptLength();
  const auto& prompt = input.prompt;
  const auto& made = output.tokens;
  to.insert(to.end(), prompt.begin() + std::min(begin, prompt_end),
            prompt.begin() + std::min(end, prompt_end));
  to.insert(to.end(), made.begin() + std::max(begin - prompt_end, 0),
            made.begin() + std::max(end - prompt_end, 0));
}

std::uint64_t Sequence::ContentOf(std::int32_t position,
                                  std::optional<TokenId> image_token_id) const {
  const TokenId token =
      position < PromptLength() ? input.prompt[position] : output.tokens[position - PromptLength()];
  if (token != image_token_id) return static_cast<std::uint32_t>(token);
  // The image token stands for a part of its picture. The first image that ends behind it has it.
  const auto& images = input.images;
  const auto image =
      std::upper_bound(images.begin(), images.end(), position,
                       [](std::int32_t place, const Image& other) { return place < other.end; });
  Ensure(image != images.end() && image->begin <= position, "an image token outside of images");
  const auto place = static_cast<std::uint64_t>(position - image->begin);
  return Scramble(image->content + place) | (std::uint64_t{1} << 63);  // unlike any token
}

Sequence MakeSequence(Request request, std::uint64_t serial, const EngineConfig& config) {
  Sequence sequence;
  for (std::size_t i = 0; i < request.image_positions.size(); ++i) {
    sequence.input.images.push_back(MakeImage(request, serial, i));
  }
  sequence.draft.tokens_max = DraftTokensMax(request, config);
  sequence.draft.golden = std::move(request.golden);
  sequence.structured.wanted = request.structured;
  sequence.request = {.id = request.seq_id,
                      .name = std::move(request.request_id),
                      .client = request.client,
                      .user = std::move(request.user),
                      .arrival = request.arrival,
                      .priority = request.priority,
                      .deadline = request.deadline,
                      .serial = serial};
  sequence.input.prompt = std::move(request.token_ids);
  sequence.input.salt = std::move(request.cache_salt);
  sequence.input.logprobs = request.prompt_logprobs;
  if (config.atomic_images) sequence.input.atomic_token = config.image_token_id;
  sequence.generation = {
      .tokens_max = request.max_tokens.value_or(std::numeric_limits<std::int64_t>::max()),
      .tokens_min = request.min_tokens,
      .length_max = config.SequenceTokensMax(),
      .stop_token_ids = std::move(request.stop_token_ids),
      .sampling = request.sampling,
      .logit_rules = std::move(request.logit_rules),
      .logprobs = request.logprobs};
  return sequence;
}

void ExpandPrompt(Sequence::Input& input, std::optional<TokenId> image_token_id) {
  std::vector<TokenId> expanded;
  std::int32_t copied = 0;  // tokens of the marked prompt that are in `expanded` already
  for (Image& image : input.images) {
    expanded.insert(expanded.end(), input.prompt.begin() + copied,
                    input.prompt.begin() + image.begin);
    copied = image.end;
    const auto begin = static_cast<std::int32_t>(expanded.size());
    const std::vector<TokenId> tokens = std::exchange(image.expansion, {});
    expanded.insert(expanded.end(), tokens.begin(), tokens.end());
    image.begin = begin;
    image.end = static_cast<std::int32_t>(expanded.size());
    const auto first_embed = std::find(tokens.begin(), tokens.end(), image_token_id);
    if (first_embed != tokens.end()) {
      image.embeds_begin = begin + static_cast<std::int32_t>(first_embed - tokens.begin());
    }
  }
  expanded.insert(expanded.end(), input.prompt.begin() + copied, input.prompt.end());
  input.prompt = std::move(expanded);
}

}  // namespace airside
