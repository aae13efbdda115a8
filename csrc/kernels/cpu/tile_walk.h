#pragma once

#include "kernels/cpu/packed_weight.h"
#include "kernels/cpu/vector.h"

// How the tile of a product is walked, whatever the weight's format: panel by panel, and in a panel
// by blocks of rows that fit the registers. Meanwhile the next panel comes from memory.
namespace airside::cpu::AIRSIDE_ISA {

inline constexpr int kVectors = 2;  // registers of features beside each other
inline constexpr int64_t kFeatures = kVectors * kLanes;

template <int kCount>
struct Rows {};

// Calls body(Rows<n>{}), 1 <= n <= kMost.
template <int kMost, typename Body>
[[gnu::always_inline]] inline void with_rows(int64_t n, const Body& body) {
  if constexpr (kMost > 1) {
    if (n < kMost) return with_rows<kMost - 1>(n, body);
  }
  body(Rows<kMost>{});
}

// Memory that a block brings into the second-level cache while it computes, some lines at each of
// its steps: all in one go would hold it up, and be late.
struct Ahead {
  static constexpr int64_t kLine = 64;

  const uint8_t* next;
  const uint8_t* end;
  int64_t lines;  // per step

  Ahead(const uint8_t* begin, int64_t bytes, int64_t steps)
      : next(begin),
        end(begin + bytes),
        lines(steps > 0 ? (bytes + steps * kLine - 1) / (steps * kLine) : 0) {}

  [[gnu::always_inline]] void fetch() {
    for (int64_t i = 0; i < lines && next < end; ++i, next += kLine) {
      __builtin_prefetch(next, 0, 2);
    }
  }
};

// Some rows by kFeatures features of a panel.
struct PanelBlock {
  int64_t row;  // the first, of the tile
  const uint8_t* panel;
  int64_t part;          // the first feature in the panel
  int64_t feature;       // and in the weight
  int64_t num_features;  // at most kFeatures; the weight has no more
  Ahead ahead;
};

// Whether a block of kRows rows fetches: few rows read so fast that they would be held up by it.
template <int kRows, int kMostRows>
inline constexpr bool kFetches = kRows >= kMostRows / 2;

// The blocks that read a panel share the fetching of the next one, each the part of its turn. A
// panel that does not stay in the cache from one block to the next is fetched by every block, from
// a fixed distance.
inline Ahead ahead_of(const uint8_t* panel, int64_t panel_bytes, int64_t steps, int64_t turn,
                      int64_t turns) {
  constexpr int64_t kBytesKept = 512 << 10;
  constexpr int64_t kDistance = 128 << 10;
  if (panel_bytes > kBytesKept) return {panel + kDistance, panel_bytes * kFeatures / kPanel, steps};
  const int64_t begin = panel_bytes * turn / turns;
  const int64_t end = panel_bytes * (turn + 1) / turns;
  return {panel + panel_bytes + begin, end - begin, steps};
}

// Calls body(Rows<n>{}, block), n <= kMostRows, for every block of the tile. No result depends on
// how rows are cut into blocks.
//
// `steps`: of a block, at each of which it calls ahead.fetch() if it kFetches.
template <int kMostRows, typename Body>
void walk_tile(const Linear& args, const LinearTile& tile, int64_t panel_bytes, int64_t steps,
               const Body& body) {
  const int64_t blocks = (tile.num_rows + kMostRows - 1) / kMostRows;
  for (int64_t i = tile.panel; i < tile.panel + tile.num_panels; ++i) {
    const uint8_t* panel = static_cast<const uint8_t*>(args.weight) + i * panel_bytes;
    const int64_t features = min(kPanel, args.out_features - i * kPanel);
    for (int64_t part = 0; part < features; part += kFeatures) {
      for (int64_t block = 0; block < blocks; ++block) {
        const int64_t row = tile.num_rows * block / blocks;
        const int64_t num_rows = tile.num_rows * (block + 1) / blocks - row;
        const int64_t turn = part / kFeatures * blocks + block;
        with_rows<kMostRows>(num_rows, [&]<int kRows>(Rows<kRows> rows) {
          body(rows, PanelBlock{.row = row,
                                .panel = panel,
                                .part = part,
                                .feature = i * kPanel + part,
                                .num_features = min(kFeatures, features - part),
                                .ahead = ahead_of(panel, panel_bytes, steps, turn,
                                                  kPanel / kFeatures * blocks)});
        });
      }
    }
  }
}

}  // namespace airside::cpu::AIRSIDE_ISA
