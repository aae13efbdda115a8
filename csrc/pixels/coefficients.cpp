#include "pixels/coefficients.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace airside::pixels {
namespace {

double bilinear(double x) {
  x = std::fabs(x);
  return x < 1.0 ? 1.0 - x : 0.0;
}

// Keys 1981 with a = -0.5.
double bicubic(double x) {
  constexpr double a = -0.5;
  x = std::fabs(x);
  if (x < 1.0) return ((a + 2.0) * x - (a + 3.0)) * x * x + 1;
  if (x < 2.0) return (((x - 5) * x + 8) * x - 4) * a;
  return 0.0;
}

double sinc(double x) {
  if (x == 0.0) return 1.0;
  x *= std::numbers::pi;
  return std::sin(x) / x;
}

double lanczos(double x) { return -3.0 <= x && x < 3.0 ? sinc(x) * sinc(x / 3) : 0.0; }

struct Kernel {
  double (*value)(double);
  double support;
};

Kernel kernel(Filter filter) {
  switch (filter) {
    case Filter::kBilinear:
      return {bilinear, 1.0};
    case Filter::kBicubic:
      return {bicubic, 2.0};
    case Filter::kLanczos:
      return {lanczos, 3.0};
  }
  __builtin_unreachable();
}

int32_t fixed_point(double weight) {
  return static_cast<int32_t>((weight < 0 ? -0.5 : 0.5) + weight * (1 << kFractionBits));
}

}  // namespace

// The order of the operations is Pillow's: another one would round some weight differently.
Coefficients coefficients(Filter filter, int64_t in_size, int64_t out_size) {
  const Kernel shape = kernel(filter);
  const double scale = static_cast<double>(in_size) / static_cast<double>(out_size);
  const double widened = std::max(scale, 1.0);  // shrinking averages over all that is under a pixel
  const double support = shape.support * widened;
  const int64_t stride = static_cast<int64_t>(std::ceil(support)) * 2 + 1;

  Coefficients made{.runs = std::vector<Coefficients::Run>(static_cast<size_t>(out_size)),
                    .weights = std::vector<int32_t>(static_cast<size_t>(out_size * stride)),
                    .stride = stride};
  std::vector<double> weights(static_cast<size_t>(stride));
  for (int64_t position = 0; position < out_size; ++position) {
    const double centre = (static_cast<double>(position) + 0.5) * scale;
    const int64_t first = std::max<int64_t>(static_cast<int64_t>(centre - support + 0.5), 0);
    const int64_t end = std::min(static_cast<int64_t>(centre + support + 0.5), in_size);
    const int64_t count = end - first;
    const double step = 1.0 / widened;
    double sum = 0.0;
    for (int64_t i = 0; i < count; ++i) {
      const double weight = shape.value((static_cast<double>(i + first) - centre + 0.5) * step);
      weights[static_cast<size_t>(i)] = weight;
      sum += weight;
    }
    for (int64_t i = 0; i < count; ++i) {
      double weight = weights[static_cast<size_t>(i)];
      if (sum != 0.0) weight /= sum;
      made.weights[static_cast<size_t>(position * stride + i)] = fixed_point(weight);
    }
    made.runs[static_cast<size_t>(position)] = {first, count};
  }
  return made;
}

}  // namespace airside::pixels
