#pragma once

// From decoded pixels to the numbers a vision tower reads: raw pointers and sizes, no framework.

#include <cstdint>
#include <optional>
#include <string_view>

namespace airside::pixels {

inline constexpr int kColours = 3;
inline constexpr int kLevels = 256;

// A picture in memory. `channels` is 3 (RGB) or 4 (RGB and a byte that is not looked at).
struct View {
  const uint8_t* data;
  int64_t width;
  int64_t height;
  int64_t channels;
  int64_t row_bytes;  // from one row to the next
};

enum class Filter { kBilinear, kBicubic, kLanczos };

enum class Order { kRowsFirst, kColumnsFirst };

// Pillow's `Image.resize` of an RGB picture, byte for byte: two convolutions, along the rows and
// along the columns, each rounded to bytes, with coefficients of 22 fractional bits. Which goes
// first changes the result, and is for the caller to say.
//
// out: [height, width, 3], without gaps. Throws std::bad_alloc.
void resize(const View& in, Filter filter, Order order, int64_t width, int64_t height,
            uint8_t* out);

// Each byte's value by colour, in planes: out[c][y][x] = levels[c][in[y][x][c]].
//
// levels: [3, 256]. Strides are in floats; the rows of a plane have no gaps between their values.
void spread(const View& in, const float* levels, float* out, int64_t plane_stride,
            int64_t row_stride);

// Chooses the instruction set of `resize` for this process: "baseline", "avx2" or "avx512". False,
// and nothing changes, where the processor lacks it. Without a call, it is the widest.
bool set_isa(std::string_view isa);

}  // namespace airside::pixels
