#include <algorithm>

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
// The least that a tile should cost, in parallel.h's unit, and the most tiles there are.
constexpr int64_t kTileCost = 32768;
constexpr int64_t kTilesMax = 256;

// In parallel.h's unit: few rows wait for the weight to come from memory, many for the arithmetic.
int64_t cost_of(const Linear& args) {
  return args.num_panels() * kPanel * args.in_features * (args.num_rows + 8) / 64;
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A grid of tiles, [row_parts][panel_parts]: whoever takes consecutive tiles keeps the rows.
struct Grid {
  int64_t row_parts;
  int64_t panel_parts;

  explicit Grid(const Linear& args) {
    const int64_t worthwhile = std::min(cost_of(args) / kTileCost + 1, kTilesMax);
    row_parts = ceil_div(args.num_rows, kTileRows);
    // A multiple of 4, so that two or four threads get equal shares.
    const int64_t wanted = (ceil_div(worthwhile, row_parts) + 3) / 4 * 4;
    panel_parts = std::min(wanted, args.num_panels());
  }

  LinearTile tile(const Linear& args, int64_t i) const {
    const auto part_begin = [](int64_t count, int64_t part, int64_t parts) {
      return count * part / parts;
    };
    const int64_t row = part_begin(args.num_rows, i / panel_parts, row_parts);
    const int64_t panel = part_begin(args.num_panels(), i % panel_parts, panel_parts);
    return {.row = row,
            .num_rows = part_begin(args.num_rows, i / panel_parts + 1, row_parts) - row,
            .panel = panel,
            .num_panels = part_begin(args.num_panels(), i % panel_parts + 1, panel_parts) - panel};
  }
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
  const Grid grid(args);
  AIRSIDE_ISA::parallel_tasks(grid.row_parts * grid.panel_parts, cost_of(args),
                              [&](int64_t i) { kernel(activation, product, grid.tile(args, i)); });
}

}  // namespace airside::cpu
