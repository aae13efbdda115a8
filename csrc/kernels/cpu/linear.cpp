#include <algorithm>
#include <vector>

#include "kernels/cpu/kernels.h"
#include "kernels/cpu/parallel.h"

namespace airside::cpu {
namespace {

using Kernel = void (*)(DType, const Linear&, const LinearTile&);

// What computes a tile of this format.
Kernel kernel_of(WeightFormat format) {
  switch (format) {
    case WeightFormat::kFloat32:
    case WeightFormat::kBFloat16:
    case WeightFormat::kFloat16:
      return kernels().linear_float;
    case WeightFormat::kInt8:
      return kernels().linear_int8;
    default:
      return kernels().linear_blocks;
  }
}

// Rows of a tile: a panel is read from memory once for so many.
constexpr int64_t kTileRows = 96;
// The least that a tile should cost, in parallel.h's unit.
constexpr int64_t kTileCost = 8192;

// In parallel.h's unit: few rows wait for the weight to come from memory, many for the arithmetic.
int64_t cost_of(int64_t num_panels, int64_t in_features, int64_t num_rows) {
  return num_panels * kPanel * in_features * (num_rows + 8) / 64;
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A grid of tiles, [row_parts][panel parts]: whoever takes consecutive tiles keeps the rows.
//
// A thread reads a tile's panels one behind the other, and the next one comes from memory
// meanwhile; the first of a tile does not. So there are a few large tiles, one for each thread, and
// ever smaller ones for whoever is done first.
class Grid {
 public:
  Grid(const Linear& args, int64_t num_threads, std::vector<int64_t>& begins)
      : args_(args), row_parts_(ceil_div(args.num_rows, kTileRows)), begins_(begins) {
    const int64_t panel_cost = cost_of(1, args.in_features, ceil_div(args.num_rows, row_parts_));
    const int64_t least = ceil_div(kTileCost, std::max<int64_t>(panel_cost, 1));
    begins_.assign(1, 0);
    while (begins_.back() < args.num_panels()) {
      const int64_t left = args.num_panels() - begins_.back();
      const int64_t each = std::max(left * 3 / (4 * num_threads), least);
      for (int64_t i = 0; i < num_threads && begins_.back() < args.num_panels(); ++i) {
        begins_.push_back(std::min(begins_.back() + each, args.num_panels()));
      }
    }
  }

  int64_t num_tiles() const { return row_parts_ * panel_parts(); }

  LinearTile tile(int64_t i) const {
    const int64_t row_part = i / panel_parts();
    const int64_t row = args_.num_rows * row_part / row_parts_;
    const int64_t* begin = begins_.data() + i % panel_parts();
    return {.row = row,
            .num_rows = args_.num_rows * (row_part + 1) / row_parts_ - row,
            .panel = begin[0],
            .num_panels = begin[1] - begin[0]};
  }

 private:
  int64_t panel_parts() const { return static_cast<int64_t>(begins_.size()) - 1; }

  const Linear& args_;
  int64_t row_parts_;
  std::vector<int64_t>& begins_;  // of the panel parts, and the end of the last
};

// All rows as integers, for all threads.
const void* quantized(DType activation, const Linear& args) {
  const int64_t bytes = kernels().quantized_row_bytes(args.format, args.in_features);
  auto* rows = reinterpret_cast<uint8_t*>(AIRSIDE_ISA::shared_scratch(args.num_rows * bytes / 4));
  AIRSIDE_ISA::parallel_for(args.num_rows, 2 * args.in_features, [&](int64_t begin, int64_t end) {
    kernels().quantize_rows(activation, args, begin, end, rows);
  });
  return rows;
}

}  // namespace

void linear(DType activation, const Linear& args) {
  if (args.num_rows == 0 || args.out_features == 0) return;
  const Kernel kernel = kernel_of(args.format);
  Linear product = args;
  if (is_quantized(args.format)) product.x = quantized(activation, args);
  thread_local std::vector<int64_t> begins;  // kept, so that a step allocates nothing
  const Grid grid(args, AIRSIDE_ISA::num_threads(), begins);
  AIRSIDE_ISA::parallel_tasks(grid.num_tiles(),
                              cost_of(args.num_panels(), args.in_features, args.num_rows),
                              [&](int64_t i) { kernel(activation, product, grid.tile(i)); });
}

}  // namespace airside::cpu
