#include <algorithm>
#include <cstring>
#include <memory>

#include "pixels/isa.h"

namespace airside::pixels {
namespace {

std::unique_ptr<uint8_t[]> buffer(int64_t num_bytes) {
  return std::make_unique_for_overwrite<uint8_t[]>(static_cast<size_t>(num_bytes));
}

// Rows of RGB without gaps, of pixels with or without a fourth channel.
void pack(const View& in, uint8_t* out) {
  for (int64_t y = 0; y < in.height; ++y, out += in.width * kColours) {
    const uint8_t* row = in.data + y * in.row_bytes;
    if (in.channels == kColours) {
      std::memcpy(out, row, static_cast<size_t>(in.width * kColours));
      continue;
    }
    for (int64_t x = 0; x < in.width; ++x) {
      for (int c = 0; c < kColours; ++c) out[x * kColours + c] = row[x * in.channels + c];
    }
  }
}

// What `resize` makes of the rows of a picture, a band at a time, in scratch memory of its own.
class RowResizer {
 public:
  RowResizer(const View& in, Filter filter, int64_t width)
      : in_(in),
        along_(coefficients(filter, in.width, width)),
        turned_(buffer((round_up(in.width, 16) + round_up(width, 16)) * kBlock)),
        row_bytes_(round_up(width * kColours, kBlock)) {}

  int64_t row_bytes() const { return row_bytes_; }

  // Up to kBand rows from `row` on, `row_bytes` apart, of RGB.
  void resize(int64_t row, uint8_t* out) {
    passes().along_rows(in_, row, along_, turned_.get(), out, row_bytes_);
  }

 private:
  View in_;
  Coefficients along_;
  std::unique_ptr<uint8_t[]> turned_;
  int64_t row_bytes_;
};

// Along the rows alone. out: RGB without gaps.
void resize_rows(const View& in, Filter filter, int64_t width, uint8_t* out) {
  RowResizer rows(in, filter, width);
  const auto band = buffer(kBand * rows.row_bytes());
  for (int64_t row = 0; row < in.height; row += kBand) {
    rows.resize(row, band.get());
    pack({band.get(), width, std::min(kBand, in.height - row), kColours, rows.row_bytes()},
         out + row * width * kColours);
  }
}

// Along the columns alone. out: rows of in.width * in.channels bytes without gaps.
void resize_columns(const View& in, Filter filter, int64_t height, uint8_t* out) {
  const Coefficients along = coefficients(filter, in.height, height);
  const int64_t num_bytes = in.width * in.channels;
  for (int64_t y = 0; y < height; ++y) {
    const Coefficients::Run run = along.runs[static_cast<size_t>(y)];
    passes().along_columns(in.data + run.first * in.row_bytes, in.row_bytes, along.of(y), run.count,
                           out + y * num_bytes, num_bytes);
  }
}

// Along the rows and then the columns, keeping no more rows than the next columns need: memory that
// is written once costs more than the arithmetic.
void resize_rows_first(const View& in, Filter filter, int64_t width, int64_t height, uint8_t* out) {
  RowResizer rows(in, filter, width);
  const Coefficients along = coefficients(filter, in.height, height);
  const int64_t row_bytes = rows.row_bytes();
  const int64_t kept_max = 2 * (along.stride + kBand);
  const auto kept = buffer((kept_max + kBand) * row_bytes);
  int64_t first = 0;  // kept rows are [first, end); a run begins in them, since runs overlap
  int64_t end = 0;
  for (int64_t y = 0; y < height; ++y) {
    const Coefficients::Run run = along.runs[static_cast<size_t>(y)];
    for (; end < run.first + run.count; end = std::min(end + kBand, in.height)) {
      if (end - first >= kept_max) {
        std::memmove(kept.get(), kept.get() + (run.first - first) * row_bytes,
                     static_cast<size_t>((end - run.first) * row_bytes));
        first = run.first;
      }
      rows.resize(end, kept.get() + (end - first) * row_bytes);
    }
    passes().along_columns(kept.get() + (run.first - first) * row_bytes, row_bytes, along.of(y),
                           run.count, out + y * width * kColours, width * kColours);
  }
}

void resize_columns_first(const View& in, Filter filter, int64_t width, int64_t height,
                          uint8_t* out) {
  const int64_t row_bytes = in.width * in.channels;
  const auto columns = buffer(height * row_bytes);
  resize_columns(in, filter, height, columns.get());
  resize_rows({columns.get(), in.width, height, in.channels, row_bytes}, filter, width, out);
}

}  // namespace

void resize(const View& in, Filter filter, Order order, int64_t width, int64_t height,
            uint8_t* out) {
  if (width == in.width && height == in.height) {
    pack(in, out);
  } else if (height == in.height) {
    resize_rows(in, filter, width, out);
  } else if (width == in.width && in.channels == kColours) {
    resize_columns(in, filter, height, out);
  } else if (width == in.width) {
    const auto columns = buffer(height * width * in.channels);
    resize_columns(in, filter, height, columns.get());
    pack({columns.get(), width, height, in.channels, width * in.channels}, out);
  } else if (order == Order::kRowsFirst) {
    resize_rows_first(in, filter, width, height, out);
  } else {
    resize_columns_first(in, filter, width, height, out);
  }
}

void spread(const View& in, const float* levels, float* out, int64_t plane_stride,
            int64_t row_stride) {
  const float* reds = levels;
  const float* greens = levels + kLevels;
  const float* blues = levels + 2 * kLevels;
  for (int64_t y = 0; y < in.height; ++y) {
    const uint8_t* row = in.data + y * in.row_bytes;
    float* red = out + y * row_stride;
    float* green = red + plane_stride;
    float* blue = green + plane_stride;
    for (int64_t x = 0; x < in.width; ++x) {
      red[x] = reds[row[x * in.channels]];
      green[x] = greens[row[x * in.channels + 1]];
      blue[x] = blues[row[x * in.channels + 2]];
    }
  }
}

}  // namespace airside::pixels
