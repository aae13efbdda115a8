#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "engine/config.h"
#include "engine/request.h"
#include "engine/types.h"

namespace airside {

// What is known of a picture once its header was read.
struct ImageShape {
  std::vector<TokenId> expansion;                 // takes the place of its mark
  std::optional<ImageHash> content = {};          // takes the place of the request's hash
  std::optional<std::int32_t> rope_advance = {};  // positions go on by; none: the number of tokens

  // How much fewer positions than tokens it takes.
  std::int32_t PositionShift() const;
};

// What is wrong with a shape, if anything.
std::optional<std::string> FindFault(const ImageShape& shape, const EngineConfig& config);

// One picture of a prompt. Its tokens are known before its pixels are.
//
// A token's rope position is its place in the sequence, less the shifts of the pictures that end
// before it. So positions go on over a whole expansion by its tokens less its shift; where the
// tokens inside of it are is the model's to say.
//
//   tokens:     | text | expansion: 6 tokens, of a 2 x 3 grid | text |
//   place:      0      4                                      10
//   position:   0      4                                      7        shift 3
struct Image {
  enum class State { kShapeUnknown, kPixelsPending, kReady };

  State state = State::kShapeUnknown;
  std::vector<TokenId> expansion;  // takes the place of the mark; empty again once it has
  // The picture's tokens in the prompt are [begin, end): the mark at first, then the expansion.
  std::int32_t begin = 0;
  std::int32_t end = 0;
  std::int32_t embeds_begin = -1;  // the first of them whose embedding is the picture's; -1: none
  // Rows may read it. That is said of a launch of the workers; should they have let go of it since,
  // they encode it again for the row.
  bool is_encoded = false;
  std::int32_t position_shift = 0;
  // Equal for equal pictures, and for no others. With the shape, it covers that too.
  std::uint64_t content = 0;

  bool WaitsForEncoder() const { return !is_encoded && embeds_begin >= 0; }

  void TakeShape(ImageShape shape);
};

// The picture at `index` of the request that is counted as `serial`.
Image MakeImage(const Request& request, std::uint64_t serial, std::size_t index);

}  // namespace airside
