// `resize` and `spread` beside loops that say what they mean, over random pictures in memory that
// ends where they end. Meant for the sanitizers: the same comparison with Pillow is a Python test.

#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "pixels/coefficients.h"
#include "pixels/pixels.h"

namespace airside::pixels {
namespace {

using Pixels = std::vector<uint8_t>;

uint8_t weighted(const Coefficients& along, int64_t position, const uint8_t* in, int64_t step) {
  const Coefficients::Run run = along.runs[static_cast<size_t>(position)];
  int64_t sum = 1 << (kFractionBits - 1);
  for (int64_t k = 0; k < run.count; ++k) {
    sum += int64_t{along.of(position)[k]} * in[(run.first + k) * step];
  }
  const int64_t whole = sum >> kFractionBits;
  return static_cast<uint8_t>(whole < 0 ? 0 : whole > 255 ? 255 : whole);
}

// in: [height][width][kColours].
Pixels by_rows(const Pixels& in, int64_t width, int64_t height, Filter filter, int64_t new_width) {
  if (new_width == width) return in;
  const Coefficients along = coefficients(filter, width, new_width);
  Pixels out;
  for (int64_t y = 0; y < height; ++y) {
    for (int64_t x = 0; x < new_width; ++x) {
      for (int64_t c = 0; c < kColours; ++c) {
        out.push_back(weighted(along, x, in.data() + y * width * kColours + c, kColours));
      }
    }
  }
  return out;
}

Pixels by_columns(const Pixels& in, int64_t width, int64_t height, Filter filter,
                  int64_t new_height) {
  if (new_height == height) return in;
  const Coefficients along = coefficients(filter, height, new_height);
  Pixels out;
  for (int64_t y = 0; y < new_height; ++y) {
    for (int64_t i = 0; i < width * kColours; ++i) {
      out.push_back(weighted(along, y, in.data() + i, width * kColours));
    }
  }
  return out;
}

class Check {
 public:
  bool resizes_right() {
    const int64_t width = size(), height = size(), new_width = size(), new_height = size();
    const int64_t channels = 3 + draw(0, 1), gap = draw(0, 1) * draw(0, 40);
    const Filter filter = static_cast<Filter>(draw(0, 2));
    const Order order = static_cast<Order>(draw(0, 1));
    const int64_t row_bytes = width * channels + gap;
    Pixels in(static_cast<size_t>(row_bytes * (height - 1) + width * channels));
    for (uint8_t& byte : in) byte = static_cast<uint8_t>(draw(0, 1) ? draw(0, 255) : 255);
    Pixels rgb;
    for (int64_t y = 0; y < height; ++y) {
      for (int64_t i = 0; i < width * channels; ++i) {
        if (i % channels < kColours) rgb.push_back(in[static_cast<size_t>(y * row_bytes + i)]);
      }
    }
    const View view{in.data(), width, height, channels, row_bytes};
    Pixels made(static_cast<size_t>(new_width * new_height * kColours));
    resize(view, filter, order, new_width, new_height, made.data());
    Pixels expected;
    if (order == Order::kRowsFirst) {
      expected = by_rows(rgb, width, height, filter, new_width);
      expected = by_columns(expected, new_width, height, filter, new_height);
    } else {
      expected = by_columns(rgb, width, height, filter, new_height);
      expected = by_rows(expected, width, new_height, filter, new_width);
    }
    return made == expected && spreads_right(view, rgb);
  }

 private:
  bool spreads_right(const View& view, const Pixels& rgb) {
    std::vector<float> levels(kColours * kLevels);
    for (size_t i = 0; i < levels.size(); ++i) levels[i] = static_cast<float>(i) / 7;
    std::vector<float> planes(rgb.size());
    spread(view, levels.data(), planes.data(), view.width * view.height, view.width);
    for (size_t i = 0; i < rgb.size(); ++i) {
      const size_t colour = i % kColours, pixel = i / kColours;
      if (planes[colour * rgb.size() / kColours + pixel] != levels[colour * kLevels + rgb[i]])
        return false;
    }
    return true;
  }

  int64_t draw(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random_);
  }
  int64_t size() { return draw(0, 3) ? draw(1, 40) : draw(1, 300); }

  std::mt19937_64 random_{1};
};

}  // namespace
}  // namespace airside::pixels

int main() {
  constexpr int kPictures = 100;
  for (const char* isa : {"baseline", "avx2", "avx512"}) {
    if (!airside::pixels::set_isa(isa)) continue;
    airside::pixels::Check check;
    for (int i = 0; i < kPictures; ++i) {
      if (check.resizes_right()) continue;
      std::printf("%s: picture %d is wrong\n", isa, i);
      return EXIT_FAILURE;
    }
    std::printf("%s: %d pictures right\n", isa, kPictures);
  }
  return EXIT_SUCCESS;
}
