#include "engine/sequence.h"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <tuple>
#include <utility>

#include "engine/ensure.h"

namespace airside {

bool Sequence::ShapesKnown() const {
  return std::all_of(input.images.begin(), input.images.end(),
                     [](const Image& image) { return image.state != Image::State::kShapeUnknown; });
}

std::int32_t Sequence::ReadyLength() const {
  if (input.images.empty()) return Length();
  if (!ShapesKnown()) return 0;
  for (const Image& image : input.images) {
    if (image.state == Image::State::kPixelsPending) return image.begin;
  }
  return Length();
}

std::int32_t Sequence::NumImageTokens() const {
  if (!ShapesKnown()) return 0;
  std::int32_t total = 0;
  for (const Image& image : input.images) total += image.end - image.begin;
  return total;
}

void Sequence::AppendTokens(std::int32_t begin, std::int32_t end, std::vector<TokenId>& to) const {
  Ensure(0 <= begin && begin <= end && end <= Length(), "tokens outside of the sequence");
  const auto prompt_end = static_cast<std::int32_t>(input.prompt.size());
  const auto& prompt = input.prompt;
  const auto& made = output.tokens;
  to.insert(to.end(), prompt.begin() + std::min(begin, prompt_end),
            prompt.begin() + std::min(end, prompt_end));
  to.insert(to.end(), made.begin() + std::max(begin - prompt_end, 0),
            made.begin() + std::max(end - prompt_end, 0));
}

Sequence MakeSequence(Request request, std::uint64_t serial) {
  Sequence sequence;
  sequence.request = {.id = request.seq_id,
                      .name = std::move(request.request_id),
                      .client = request.client,
                      .arrival = request.arrival,
                      .priority = request.priority,
                      .deadline = request.deadline,
                      .serial = serial};
  sequence.input.prompt = std::move(request.token_ids);
  for (const std::int32_t position : request.image_positions) {
    sequence.input.images.push_back({.expansion = {}, .begin = position, .end = position + 1});
  }
  sequence.generation = {
      .tokens_max = request.max_tokens.value_or(std::numeric_limits<std::int64_t>::max()),
      .tokens_min = request.min_tokens,
      .stop_token_ids = std::move(request.stop_token_ids),
      .sampling = request.sampling};
  return sequence;
}

void ExpandPrompt(Sequence::Input& input) {
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
  }
  expanded.insert(expanded.end(), input.prompt.begin() + copied, input.prompt.end());
  input.prompt = std::move(expanded);
}

bool ComesBefore(const Sequence& a, const Sequence& b) {
  static constexpr Seconds kNever = std::numeric_limits<Seconds>::infinity();
  const auto key = [](const Sequence::RequestGroup& request) {
    return std::make_tuple(request.priority, request.deadline.value_or(kNever), request.arrival,
                           request.serial);
  };
  return key(a.request) < key(b.request);
}

}  // namespace airside
