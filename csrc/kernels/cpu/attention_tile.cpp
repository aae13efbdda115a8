// One tile of query rows against all keys that any of them sees, with an online softmax over
// tiles of keys (Milakov & Gimelshein 2018, arXiv 1805.02867; Dao et al. 2022, arXiv 2205.14135).
//
// A row's result is a function of its query, its keys and its position. It does not depend on the
// other rows, nor on how the cache is cut into blocks, because
//   - tiles of keys start at multiples of kKeyTile in the sequence, whoever asks;
//   - a score is one lane that adds its products in the order of head_dim, and an output is one
//     lane that adds in the order of positions, so the rows computed beside it change nothing;
//   - a row never adds a term for a key that it does not see.

#include "kernels/cpu/isa.h"
#include "kernels/cpu/vector.h"

namespace airside::cpu::AIRSIDE_ISA {
namespace {

constexpr int64_t kKeyTile = 64;

// What fits the registers: kMaxRows x kMaxVectors sums, kMaxVectors operands and one broadcast.
constexpr int kMaxRows = 6;
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kMaxVectors = 4;
#else
constexpr int kMaxVectors = 2;
#endif
static_assert(kKeyTile % (kLanes * kMaxVectors) == 0);

// The scratch of one tile. `width` is head_dim rounded up to vectors of any width; the lanes beyond
// head_dim in the vectors that hold it are 0.
struct Buffers {
  float* queries;  // [rows, width]
  float* keys;     // [width, kKeyTile]: transposed
  float* values;   // [kKeyTile, width]
  float* scores;   // [rows, kKeyTile]: then the weights
  float* sums;     // [rows, width]
  float* tops;     // [rows]: the largest score so far
  float* masses;   // [rows]: the sum of weights so far, relative to exp(top)
};

int64_t padded(int64_t n) { return round_up(n, 16); }

int64_t max_rows(const PagedAttention& args) { return max(args.group(), kAttentionTileRows); }

Buffers carve(const PagedAttention& args, float* scratch) {
  const int64_t rows = max_rows(args);
  const int64_t width = padded(args.head_dim);
  Buffers b;
  b.queries = scratch;
  b.keys = b.queries + rows * width;
  b.values = b.keys + width * kKeyTile;
  b.scores = b.values + kKeyTile * width;
  b.sums = b.scores + rows * kKeyTile;
  b.tops = b.sums + rows * width;
  b.masses = b.tops + padded(rows);
  return b;
}

// Calls body with `count` as a constant, 1 <= count <= kMax.
template <int kMax, typename Body>
void with_constant(int64_t count, const Body& body) {
  if constexpr (kMax > 1) {
    if (count < kMax) return with_constant<kMax - 1>(count, body);
  }
  body(std::integral_constant<int, kMax>{});
}

// ---- who sees what

// Positions [begin, end) of the sequence.
struct Sight {
  int64_t begin;
  int64_t end;
};

// What the tile's token with this index sees.
Sight sight_of(const PagedAttention& args, const AttentionTile& tile, int64_t token) {
  const int64_t position = tile.first_position + token;
  return {args.first_seen(position),
          args.attend_to == nullptr ? position + 1 : args.attend_to[tile.first_token + token]};
}

// What any of its tokens sees.
Sight sight_of(const PagedAttention& args, const AttentionTile& tile) {
  Sight all{args.first_seen(tile.first_position), tile.first_position + tile.num_tokens};
  for (int64_t i = 0; args.attend_to != nullptr && i < tile.num_tokens; ++i) {
    all.end = max(all.end, args.attend_to[tile.first_token + i]);
  }
  return all;
}

// The tokens of the tile that see some of the keys at [start, end): those before them have their
// sight's end too early, those behind them its begin too late.
Sight tokens_that_see(const PagedAttention& args, const AttentionTile& tile, int64_t start,
                      int64_t end) {
  Sight tokens{0, tile.num_tokens};
  while (tokens.begin < tokens.end && sight_of(args, tile, tokens.begin).end <= start) {
    ++tokens.begin;
  }
  while (tokens.end > tokens.begin && sight_of(args, tile, tokens.end - 1).begin >= end) {
    --tokens.end;
  }
  return tokens;
}

// ---- loading

// Where the rows of keys [start, start + count) of one KV head begin in the cache, in elements.
void find_rows(const PagedAttention& args, const AttentionTile& tile, int64_t start, int64_t count,
               int64_t* rows) {
  int64_t slot = start / args.block_size;
  int64_t offset = start % args.block_size;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t head = tile.block_table[slot] * args.num_kv_heads + tile.kv_head;
    rows[i] = (head * args.block_size + offset) * args.head_dim;
    if (++offset == args.block_size) {
      offset = 0;
      ++slot;
    }
  }
}

// Loads kLanes elements of each of kLanes keys, transposed: to[i] is element i of all keys. Of keys
// from `count` on, and of elements from `left` on, there is 0.
template <typename T>
[[gnu::always_inline]] inline void load_square(const T* cache, const int64_t* rows, int64_t count,
                                               int64_t left, float* to) {
  Floats square[kLanes];
  if (count >= kLanes && left >= kLanes) {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) square[i] = load(cache + rows[i]);
  } else {
    for (int i = 0; i < kLanes; ++i) {
      square[i] = i < count ? load_first(cache + rows[i], left) : Floats{};
    }
  }
  transpose(square);
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) store(to + i * kKeyTile, square[i]);
}

template <typename T>
void load_keys(const T* cache, const int64_t* rows, int64_t count, int64_t head_dim, float* keys) {
  const int64_t filled = round_up(count, kLanes * kMaxVectors);
  for (int64_t t = 0; t < filled; t += kLanes) {
    for (int64_t d = 0; d < head_dim; d += kLanes) {
      load_square(cache + d, rows + t, count - t, head_dim - d, keys + d * kKeyTile + t);
    }
  }
}

template <typename T>
void load_rows(const T* from, const int64_t* rows, int64_t count, int64_t head_dim, int64_t width,
               float* to) {
  for (int64_t t = 0; t < count; ++t) {
    for (int64_t d = 0; d < head_dim; d += kLanes) {
      store(to + t * width + d, load_first(from + rows[t] + d, head_dim - d));
    }
  }
}

template <typename T>
void load_queries(const PagedAttention& args, const AttentionTile& tile, int64_t width,
                  float* queries) {
  const int64_t group = args.group();
  for (int64_t row = 0; row < tile.num_tokens * group; ++row) {
    const int64_t head = tile.kv_head * group + row % group;
    const int64_t begin = (tile.first_token + row / group) * args.q_stride + head * args.head_dim;
    load_rows(static_cast<const T*>(args.q), &begin, 1, args.head_dim, width,
              queries + row * width);
  }
}

// ---- arithmetic

// scores[r, t] = queries[r] . keys[t] for kRows rows and at least `count` keys.
template <int kRows>
void score(const float* queries, int64_t width, const float* keys, int64_t head_dim, int64_t count,
           float* scores) {
  for (int64_t t = 0; t < count; t += kLanes * kMaxVectors) {
    Floats sums[kRows][kMaxVectors] = {};
    for (int64_t d = 0; d < head_dim; ++d) {
      Floats key[kMaxVectors];
#pragma GCC unroll 4
      for (int j = 0; j < kMaxVectors; ++j) key[j] = load(keys + d * kKeyTile + t + j * kLanes);
#pragma GCC unroll 6
      for (int r = 0; r < kRows; ++r) {
        const Floats query = splat(queries[r * width + d]);
#pragma GCC unroll 4
        for (int j = 0; j < kMaxVectors; ++j) sums[r][j] = fma(query, key[j], sums[r][j]);
      }
    }
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int j = 0; j < kMaxVectors; ++j)
        store(scores + r * kKeyTile + t + j * kLanes, sums[r][j]);
    }
  }
}

// Turns the scores [seen.begin, seen.end) of a row into weights exp(score - top), and the row's
// sums to the new top.
void weigh_scores(float* scores, Sight seen, float scale, float& top, float& mass, float* sums,
                  int64_t width) {
  Ints lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = i;
  Floats tops = splat(-kInfinity);
  const int64_t first = seen.begin / kLanes * kLanes;
  for (int64_t t = first; t < seen.end; t += kLanes) {
    const Floats scaled = load(scores + t) * splat(scale);
    Floats kept = lane < static_cast<int32_t>(seen.end - t) ? scaled : splat(-kInfinity);
    if (t < seen.begin) {
      kept = lane < static_cast<int32_t>(seen.begin - t) ? splat(-kInfinity) : kept;
    }
    store(scores + t, kept);
    tops = larger(kept, tops);
  }
  const float tile_top = largest_of(tops);
  const float new_top = top > tile_top ? top : tile_top;
  const float base = new_top == -kInfinity ? 0.0f : new_top;  // -inf - -inf would be NaN
  Floats tile_mass = {};
  for (int64_t t = first; t < seen.end; t += kLanes) {
    const Floats weight = exp(load(scores + t) - splat(base));
    store(scores + t, weight);
    tile_mass += weight;
  }
  const Floats shrink = exp(splat(top - base));
  mass = mass * shrink[0] + sum_of(tile_mass);
  if (top != new_top) {
    for (int64_t d = 0; d < width; d += kLanes) store(sums + d, load(sums + d) * shrink);
  }
  top = new_top;
}

// sums[r] += weights[r, t] * values[t] for t in [begin, end), in that order.
template <int kRows, int kVectors>
void add_values(const float* weights, const float* values, int64_t width, int64_t begin,
                int64_t end, float* sums) {
  Floats sum[kRows][kVectors];
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) sum[r][j] = load(sums + r * width + j * kLanes);
  }
  for (int64_t t = begin; t < end; ++t) {
    Floats value[kVectors];
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) value[j] = load(values + t * width + j * kLanes);
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
      const Floats weight = splat(weights[r * kKeyTile + t]);
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) sum[r][j] = fma(weight, value[j], sum[r][j]);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) store(sums + r * width + j * kLanes, sum[r][j]);
  }
}

template <int kRows>
void add_all_values(const float* weights, const float* values, int64_t head_dim, int64_t width,
                    int64_t begin, int64_t end, float* sums) {
  for (int64_t d = 0; d < head_dim; d += kLanes * kMaxVectors) {
    const int64_t vectors = min(kMaxVectors, (head_dim - d + kLanes - 1) / kLanes);
    with_constant<kMaxVectors>(vectors, [&]<int kVectors>(std::integral_constant<int, kVectors>) {
      add_values<kRows, kVectors>(weights, values + d, width, begin, end, sums + d);
    });
  }
}

// ---- one tile

// kRows rows from `row` on against the loaded keys, which start at position `start`.
template <int kRows>
void attend_rows(const PagedAttention& args, const AttentionTile& tile, const Buffers& b,
                 int64_t start, int64_t num_keys, int64_t row) {
  const int64_t width = padded(args.head_dim);
  Sight seen[kRows];  // of the loaded keys; may be empty
  Sight together{0, num_keys};
  int64_t last = 0;
  for (int r = 0; r < kRows; ++r) {
    const Sight sight = sight_of(args, tile, (row + r) / args.group());
    seen[r].end = min(num_keys, max(0, sight.end - start));
    seen[r].begin = min(seen[r].end, max(0, sight.begin - start));
    together = {max(together.begin, seen[r].begin), min(together.end, seen[r].end)};
    last = max(last, seen[r].end);
  }
  float* scores = b.scores + row * kKeyTile;
  float* sums = b.sums + row * width;
  score<kRows>(b.queries + row * width, width, b.keys, args.head_dim, last, scores);
  for (int r = 0; r < kRows; ++r) {
    if (seen[r].begin == seen[r].end) continue;
    weigh_scores(scores + r * kKeyTile, seen[r], args.scale, b.tops[row + r], b.masses[row + r],
                 sums + r * width, width);
  }
  // The few keys that only the earlier rows see, what all see together, and those that only the
  // later ones see.
  if (together.begin > together.end) together = {num_keys, num_keys};
  const auto add_own = [&](int r, int64_t begin, int64_t end) {
    if (begin >= end) return;
    add_all_values<1>(scores + r * kKeyTile, b.values, args.head_dim, width, begin, end,
                      sums + r * width);
  };
  for (int r = 0; r < kRows; ++r) add_own(r, seen[r].begin, min(seen[r].end, together.begin));
  add_all_values<kRows>(scores, b.values, args.head_dim, width, together.begin, together.end, sums);
  for (int r = 0; r < kRows; ++r) add_own(r, max(seen[r].begin, together.end), seen[r].end);
}

template <typename T>
void store_rows(const PagedAttention& args, const AttentionTile& tile, const Buffers& b) {
  const int64_t group = args.group();
  const int64_t width = padded(args.head_dim);
  for (int64_t row = 0; row < tile.num_tokens * group; ++row) {
    const int64_t head = tile.kv_head * group + row % group;
    const int64_t token = tile.first_token + row / group;
    T* out = static_cast<T*>(args.out) + (token * args.num_heads + head) * args.head_dim;
    for (int64_t d = 0; d < args.head_dim; d += kLanes) {
      store_first(out + d, load(b.sums + row * width + d) / splat(b.masses[row]),
                  args.head_dim - d);
    }
  }
}

template <typename T>
void attend_tile(const PagedAttention& args, const AttentionTile& tile, const Buffers& b) {
  const int64_t width = padded(args.head_dim);
  const int64_t num_rows = tile.num_tokens * args.group();
  const Sight all = sight_of(args, tile);
  load_queries<T>(args, tile, width, b.queries);
  for (int64_t i = 0; i < num_rows * width; ++i) b.sums[i] = 0.0f;
  for (int64_t row = 0; row < num_rows; ++row) {
    b.tops[row] = -kInfinity;
    b.masses[row] = 0.0f;
  }
  for (int64_t start = all.begin / kKeyTile * kKeyTile; start < all.end; start += kKeyTile) {
    const int64_t num_keys = min(kKeyTile, all.end - start);
    int64_t rows[kKeyTile];
    find_rows(args, tile, start, num_keys, rows);
    load_keys(static_cast<const T*>(args.k_cache), rows, num_keys, args.head_dim, b.keys);
    load_rows(static_cast<const T*>(args.v_cache), rows, num_keys, args.head_dim, width, b.values);
    const Sight tokens = tokens_that_see(args, tile, start, start + num_keys);
    const int64_t end_row = tokens.end * args.group();
    for (int64_t row = tokens.begin * args.group(); row < end_row; row += kMaxRows) {
      with_constant<kMaxRows>(end_row - row, [&]<int kRows>(std::integral_constant<int, kRows>) {
        attend_rows<kRows>(args, tile, b, start, num_keys, row);
      });
    }
  }
  store_rows<T>(args, tile, b);
}

}  // namespace

int64_t attention_scratch_floats(const PagedAttention& args) {
  const int64_t rows = max_rows(args);
  const int64_t width = padded(args.head_dim);
  return 2 * rows * width + 2 * kKeyTile * width + rows * kKeyTile + 2 * padded(rows);
}

void attend(DType dtype, const PagedAttention& args, const AttentionTile& tile, float* scratch) {
  const Buffers buffers = carve(args, scratch);
  visit(dtype, [&]<typename T>(T*) { attend_tile<T>(args, tile, buffers); });
}

}  // namespace airside::cpu::AIRSIDE_ISA
