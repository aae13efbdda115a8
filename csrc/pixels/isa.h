#pragma once

#include <cstdint>

#include "pixels/coefficients.h"
#include "pixels/pixels.h"

// What is compiled once per instruction set (passes.cpp), and the table of it.
namespace airside::pixels {

// The passes work on bytes side by side that get equal weights: `kBlock` of them at a time. Along
// the rows that is a column of 32 rows, which is turned to lie side by side first.
inline constexpr int64_t kBand = 32;                 // rows
inline constexpr int64_t kBlock = kColours * kBand;  // bytes

constexpr int64_t round_up(int64_t n, int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

struct Passes {
  const char* isa;

  // Rows [first_row, first_row + kBand) of `in`, resized along the row. Rows behind the last one
  // are not written.
  //
  // turned: scratch for round_up(in.width, 16) + round_up(width, 16) columns of kBlock bytes.
  // out: row first_row of a picture whose rows are `out_row_bytes` apart, a multiple of kBlock.
  void (*along_rows)(const View& in, int64_t first_row, const Coefficients& along, uint8_t* turned,
                     uint8_t* out, int64_t out_row_bytes);

  // One row of num_bytes: the weighted sum of `count` rows that are `row_bytes` apart.
  void (*along_columns)(const uint8_t* in, int64_t row_bytes, const int32_t* weights, int64_t count,
                        uint8_t* out, int64_t num_bytes);
};

const Passes& passes();

}  // namespace airside::pixels
