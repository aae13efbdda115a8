#include "engine/image.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "engine/scramble.h"

namespace airside {
namespace {

std::uint64_t ContentOf(const ImageHash& hash) {
  std::uint64_t halves[2];
  std::memcpy(halves, hash.data(), sizeof(halves));
  return Scramble(Scramble(halves[0]) ^ halves[1]);
}

}  // namespace

std::int32_t ImageShape::PositionShift() const {
  const auto num_tokens = static_cast<std::int32_t>(expansion.size());
  return num_tokens - rope_advance.value_or(num_tokens);
}

std::optional<std::string> FindFault(const ImageShape& shape, const EngineConfig& config) {
  if (shape.expansion.empty()) return "an expansion needs at least one token";
  if (auto fault = FindStranger("expansion", shape.expansion, config)) return fault;
  const std::size_t num_tokens = shape.expansion.size();
  const std::string advance = "rope_advance is " + std::to_string(shape.rope_advance.value_or(0));
  if (shape.rope_advance &&
      (*shape.rope_advance < 1 || static_cast<std::size_t>(*shape.rope_advance) > num_tokens)) {
    return advance + ", but must be in [1, " + std::to_string(num_tokens) +
           "], the number of tokens, or 0 for that";
  }
  // The key of a block knows of a picture by its image tokens, and positions are part of its
  // content.
  const bool is_seen = std::find(shape.expansion.begin(), shape.expansion.end(),
                                 config.image_token_id) != shape.expansion.end();
  if (shape.PositionShift() != 0 && !is_seen) {
    return advance + " in an expansion of " + std::to_string(num_tokens) +
           " tokens, none of which is the image token";
  }
  return std::nullopt;
}

void Image::TakeShape(ImageShape shape) {
  state = State::kPixelsPending;
  if (shape.content) content = ContentOf(*shape.content);
  position_shift = shape.PositionShift();
  content = Scramble(content + Scramble(shape.expansion.size()));
  content = Scramble(content + static_cast<std::uint64_t>(position_shift));
  expansion = std::move(shape.expansion);
}

Image MakeImage(const Request& request, std::uint64_t serial, std::size_t index) {
  Image image;
  image.begin = request.image_positions[index];
  image.end = image.begin + 1;
  const auto& hashes = request.image_hashes;
  // Without a hash, a picture is like no other: it stands for its place in its own sequence.
  image.content = hashes.empty() || !hashes[index] ? Scramble(Scramble(~serial) + index)
                                                   : ContentOf(*hashes[index]);
  return image;
}

}  // namespace airside
