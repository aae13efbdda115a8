// One tile of query rows against the keys that any of them sees, with a softmax over tiles of keys
// (Milakov & Gimelshein 2018, arXiv 1805.02867; Dao et al. 2022, arXiv 2205.14135): each tile of
// keys gives a part, which is the largest score, the mass and the weighted sum of values relative
// to that score, and parts are merged in the order of positions.
//
// A row's result is a function of its query, its keys and its position. It does not depend on the
// other rows, nor on how the cache is cut into blocks, because
//   - tiles of keys start at multiples of kKeyTile in the sequence, whoever asks, and so do pairs
//     of keys at even positions;
//   - a score is one lane that adds its products in the order of head_dim, and an output is one
//     lane that adds in the order of positions, so the rows computed beside it change nothing;
//   - a key that a row does not see is 0 to it, weight and value, where a pair has such a key, and
//     nothing elsewhere.

#include "kernels/cpu/attention_products.h"
#include "kernels/cpu/attention_weights.h"
#include "kernels/cpu/isa.h"
#include "kernels/cpu/vector.h"

namespace airside::cpu::AIRSIDE_ISA {
namespace {

// Of some query rows, over some keys.
struct Parts {
  float* sums;    // [rows, width]
  float* tops;    // [rows]: the largest score
  float* masses;  // [rows]: the sum of weights, relative to exp(top)
};

// The scratch of one tile. `width` is head_dim rounded up to vectors of any width; what is in the
// columns beyond head_dim has no meaning.
struct Buffers {
  float* queries;  // [rows, steps] cells
  float* keys;     // [kGroups, steps, kGroup] words: of blocks that cannot be read where they are
  float* values;   // [kKeyTile / kPair, width] words: likewise
  float* scores;   // [kMaxRows, kScoreStride]: then the weights, as cells
  Parts part;      // of kMaxRows rows over one tile of keys
  Parts all;       // of all rows, over the tiles so far
};

int64_t padded(int64_t n) { return round_up(n, 16); }

int64_t max_rows(const PagedAttention& args) { return max(args.group(), kAttentionTileRows); }

int64_t parts_floats(const PagedAttention& args, int64_t rows) {
  return rows * padded(args.head_dim) + 2 * padded(rows);
}

Parts carve_parts(const PagedAttention& args, int64_t rows, float* memory) {
  float* tops = memory + rows * padded(args.head_dim);
  return {memory, tops, tops + padded(rows)};
}

Parts rows_from(const PagedAttention& args, const Parts& parts, int64_t row) {
  return {parts.sums + row * padded(args.head_dim), parts.tops + row, parts.masses + row};
}

Buffers carve(const PagedAttention& args, float* scratch) {
  const int64_t width = padded(args.head_dim);
  Buffers b;
  b.queries = scratch;
  b.keys = b.queries + max_rows(args) * width;
  b.values = b.keys + width * kKeyTile;
  b.scores = b.values + kKeyTile * width;
  float* parts = b.scores + kMaxRows * kScoreStride;
  b.part = carve_parts(args, kMaxRows, parts);
  b.all = carve_parts(args, max_rows(args), parts + parts_floats(args, kMaxRows));
  return b;
}

template <typename T>
int64_t steps_of(int64_t size) {
  return (size + kPair<T> - 1) / kPair<T>;
}

// Calls body with as many rows of `count` as one register tile takes, as a constant.
template <int kMax, typename Body>
void with_rows(int64_t count, const Body& body) {
  if constexpr (kMax > 6) {
    if (count < kMax) return with_rows<6>(count, body);
  } else if constexpr (kMax > 1) {
    if (count < kMax) return with_rows<kMax - 1>(count, body);
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

template <typename T>
void load_queries(const PagedAttention& args, const AttentionTile& tile, float* queries) {
  const int64_t group = args.group();
  const int64_t cells = steps_of<T>(args.head_dim) * kParts<T>;
  for (int64_t row = 0; row < tile.num_tokens * group; ++row) {
    const int64_t head = tile.kv_head * group + row % group;
    const T* query = static_cast<const T*>(args.q) +
                     (tile.first_token + row / group) * args.q_stride + head * args.head_dim;
    float* to = queries + row * cells;
    to[cells - 1] = 0.0f;  // of an odd head_dim: half or all of it is no element
    if constexpr (kDots<T>) {
      __builtin_memcpy(to, query, args.head_dim * sizeof(T));
    } else {
      for (int64_t d = 0; d < args.head_dim; d += kLanes) {
        const int64_t left = args.head_dim - d;
        store_first(to + d, load_first(query + d, left), left);
      }
    }
  }
}

// Where the sequence's block with this index begins in a cache, in elements.
int64_t block_begin(const PagedAttention& args, const AttentionTile& tile, int64_t index) {
  const int64_t head = tile.block_table[index] * args.num_kv_heads + tile.kv_head;
  return head * args.block_size * args.head_dim;
}

template <typename T>
const uint32_t* words_at(const void* cache, int64_t element) {
  return reinterpret_cast<const uint32_t*>(static_cast<const T*>(cache) + element);
}

// Where the keys and values of a sequence from a position on are read.
template <typename T>
void find_group(const PagedAttention& args, const AttentionTile& tile, int64_t position,
                const uint32_t*& key, const uint32_t*& value) {
  const int64_t begin = block_begin(args, tile, position / args.block_size);
  const int64_t offset = position % args.block_size;
  key = words_at<T>(args.k_cache, begin + offset * kPair<T>);
  value = words_at<T>(args.v_cache, begin + offset * args.head_dim);
}

// Blocks of whole groups are read where they are. Behind the groups of this tile of keys come those
// that will be read next: of this sequence, or where it ends, of `next`, if any.
template <typename T>
void find_groups(const PagedAttention& args, const AttentionTile& tile, const AttentionTile* next,
                 int64_t start, int64_t left, Words32& keys, Words32& values) {
  keys.stride = args.block_size;
  values.stride = args.head_dim;
  const int64_t own = min((left + kGroup - 1) / kGroup, kGroups + kGroupsAhead);
  for (int64_t g = 0; g < own; ++g) {
    find_group<T>(args, tile, start + g * kGroup, keys.groups[g], values.groups[g]);
  }
  const int64_t next_start = next == nullptr ? 0 : next->begin / kKeyTile * kKeyTile;
  for (int64_t g = own; g < kGroups + kGroupsAhead; ++g) {
    const int64_t position = next_start + (g - own) * kGroup;
    if (next != nullptr && position < next->end) {
      find_group<T>(args, *next, position, keys.groups[g], values.groups[g]);
    } else {
      keys.groups[g] = keys.groups[g - 1];
      values.groups[g] = values.groups[g - 1];
    }
  }
}

template <typename T>
void gather_key(const T* block, int64_t offset, int64_t block_size, int64_t head_dim, T* to) {
  for (int64_t d = 0; d < head_dim; ++d) {
    to[d / kPair<T> * kGroup * kPair<T> + d % kPair<T>] =
        block[key_index<T>(offset, block_size, d, head_dim)];
  }
  if (head_dim % kPair<T> != 0) to[head_dim / kPair<T> * kGroup * kPair<T> + 1] = T{};
}

template <typename T>
void gather_value(const T* block, int64_t offset, int64_t block_size, int64_t head_dim, T* to) {
  for (int64_t d = 0; d < head_dim; ++d) {
    to[d * kPair<T>] = block[value_index<T>(offset, block_size, d, head_dim)];
  }
}

// Other blocks are copied to groups in scratch.
template <typename T>
void gather(const PagedAttention& args, const AttentionTile& tile, const Buffers& b, int64_t start,
            int64_t count, Words32& keys, Words32& values) {
  const int64_t steps = steps_of<T>(args.head_dim);
  const int64_t width = padded(args.head_dim);
  keys.stride = kGroup;
  values.stride = width;
  for (int64_t i = 0; i < kGroups + kGroupsAhead; ++i) {
    const int64_t g = min(i, kGroups - 1);
    keys.groups[i] = words_at<float>(b.keys, g * steps * kGroup);
    values.groups[i] = words_at<float>(b.values, g * (kGroup / kPair<T>)*width);
  }
  auto* key_halves = reinterpret_cast<T*>(b.keys);
  auto* value_halves = reinterpret_cast<T*>(b.values);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t position = start + i;
    const int64_t begin = block_begin(args, tile, position / args.block_size);
    const int64_t offset = position % args.block_size;
    gather_key(static_cast<const T*>(args.k_cache) + begin, offset, args.block_size, args.head_dim,
               key_halves + (i / kGroup * steps * kGroup + i % kGroup) * kPair<T>);
    gather_value(static_cast<const T*>(args.v_cache) + begin, offset, args.block_size,
                 args.head_dim, value_halves + i / kPair<T> * width * kPair<T> + i % kPair<T>);
  }
}

// ---- softmax

// Gives scores outside of [seen.begin, seen.end) no weight, as far as weights are computed.
template <typename T>
void hide_unseen(float* scores, Sight seen) {
  Ints lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = i;
  const Floats hidden = splat(-kInfinity);
  for (int64_t t = seen.begin / kWeightLanes<T> * kWeightLanes<T>; t < seen.begin; t += kLanes) {
    const Floats old = load(scores + t);
    store(scores + t, lane < static_cast<int32_t>(seen.begin - t) ? hidden : old);
  }
  const int64_t stop = round_up(seen.end, kWeightLanes<T>);
  for (int64_t t = seen.end / kLanes * kLanes; t < stop; t += kLanes) {
    const Floats old = load(scores + t);
    store(scores + t, lane < static_cast<int32_t>(seen.end - t) ? old : hidden);
  }
}

// Turns the scores [seen.begin, seen.end) of each row into weights. Each pass goes over all rows,
// so that none waits for the end of another's sum.
template <typename T, int kRows>
void weigh_rows(float* scores, const Sight (&seen)[kRows], const Parts& part) {
  const auto first = [&](int r) { return seen[r].begin / kWeightLanes<T> * kWeightLanes<T>; };
  Floats sums[kRows];
  for (int r = 0; r < kRows; ++r) {
    sums[r] = splat(-kInfinity);
    if (seen[r].begin == seen[r].end) continue;
    float* row = scores + r * kScoreStride;
    hide_unseen<T>(row, seen[r]);
    for (int64_t t = first(r); t < seen[r].end; t += kLanes)
      sums[r] = larger(load(row + t), sums[r]);
  }
  for (int r = 0; r < kRows; ++r) part.tops[r] = largest_of(sums[r]);
  for (int r = 0; r < kRows; ++r) {
    sums[r] = Floats{};
    if (seen[r].begin == seen[r].end) continue;
    float* row = scores + r * kScoreStride;
    const float top = part.tops[r];
    const Floats base = splat(top == -kInfinity ? 0.0f : top);  // -inf - -inf would be NaN
    for (int64_t t = first(r); t < seen[r].end; t += kWeightLanes<T>) {
      sums[r] = weigh<T>(row, t, base, sums[r]);
    }
  }
  for (int r = 0; r < kRows; ++r) part.masses[r] = sum_of(sums[r]);
}

// Merges the next part of some rows into what there is.
template <typename T>
void merge(const PagedAttention& args, const Parts& part, int64_t num_rows, const Parts& all) {
  const int64_t width = padded(args.head_dim);
  for (int64_t begin = 0; begin < num_rows; begin += kLanes) {
    const int64_t count = min(kLanes, num_rows - begin);
    const Floats tops = load_first(all.tops + begin, count);
    const Floats part_tops = load_first(part.tops + begin, count);
    const Floats new_tops = tops > part_tops ? tops : part_tops;
    const Floats bases = new_tops == splat(-kInfinity) ? Floats{} : new_tops;
    const Floats shrink = weight_of<T>(tops - bases);
    const Floats shrink_part = weight_of<T>(part_tops - bases);
    const Floats masses = load_first(all.masses + begin, count) * shrink +
                          load_first(part.masses + begin, count) * shrink_part;
    float factors[2][kLanes];
    store(factors[0], shrink);
    store(factors[1], shrink_part);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t row = begin + i;
      if (part.tops[row] == -kInfinity && part.masses[row] == 0.0f) continue;  // sees none of it
      all.tops[row] = new_tops[i];
      all.masses[row] = masses[i];
      float* sums = all.sums + row * width;
      const float* more = part.sums + row * width;
      for (int64_t d = 0; d < width; d += kLanes) {
        store(sums + d,
              fma(load(more + d), splat(factors[1][i]), load(sums + d) * splat(factors[0][i])));
      }
    }
  }
}

// ---- one tile

void clear(const PagedAttention& args, const Parts& parts, int64_t num_rows) {
  for (int64_t i = 0; i < num_rows * padded(args.head_dim); ++i) parts.sums[i] = 0.0f;
  for (int64_t row = 0; row < num_rows; ++row) {
    parts.tops[row] = -kInfinity;
    parts.masses[row] = 0.0f;
  }
}

// The keys that one token sees of the tile of keys, from its start on; may be empty.
Sight seen_of_tile(const PagedAttention& args, const AttentionTile& tile, int64_t token,
                   int64_t start, int64_t num_keys) {
  const Sight sight = sight_of(args, tile, token);
  const int64_t end = min(num_keys, max(0, sight.end - start));
  return {min(end, max(0, sight.begin - start)), end};
}

// The part of kRows rows from `row` on, over the tile of keys that starts at position `start`.
template <typename T, int kRows>
void attend_rows(const PagedAttention& args, const AttentionTile& tile, const Buffers& b,
                 const Words32& keys, const Words32& values, int64_t start, int64_t num_keys,
                 int64_t row, const Parts& part) {
  const int64_t width = padded(args.head_dim);
  const int64_t steps = steps_of<T>(args.head_dim);
  Sight seen[kRows];
  Sight any{num_keys, 0};
  Sight together{0, num_keys};
  for (int r = 0; r < kRows; ++r) {
    seen[r] = seen_of_tile(args, tile, (row + r) / args.group(), start, num_keys);
    together = {max(together.begin, seen[r].begin), min(together.end, seen[r].end)};
    if (seen[r].begin < seen[r].end) {
      any = {min(any.begin, seen[r].begin), max(any.end, seen[r].end)};
    }
  }
  clear(args, part, kRows);
  score<T, kRows>(b.queries + row * steps * kParts<T>, keys, values, steps, any.begin, any.end,
                  score_scale<T>(args), b.scores);
  weigh_rows<T, kRows>(b.scores, seen, part);
  // The few keys that only the earlier rows see, what all see together, and those that only the
  // later ones see, in steps.
  together = {steps_of<T>(together.begin), together.end / kPair<T>};
  if (together.begin >= together.end) together = {kKeyTile, kKeyTile};
  const auto add_own = [&](int r, int64_t begin, int64_t end) {
    add_seen_values<T>(b.scores + r * kScoreStride, values, begin, end, seen[r].begin, seen[r].end,
                       part.sums + r * width, width);
  };
  for (int r = 0; r < kRows; ++r) {
    add_own(r, seen[r].begin / kPair<T>, min(steps_of<T>(seen[r].end), together.begin));
  }
  add_values<T, kRows>(b.scores, values, together.begin, together.end, part.sums, width);
  for (int r = 0; r < kRows; ++r) {
    add_own(r, max(seen[r].begin / kPair<T>, together.end), steps_of<T>(seen[r].end));
  }
}

// All rows over the tile of keys that starts at position `start`; `next`: what will be attended to
// after the sequence's end, or null. Each register tile of rows has
// its part in part_of(row), and then done(row, rows) is called.
template <typename T, typename PartOf, typename Done>
void attend_keys(const PagedAttention& args, const AttentionTile& tile, const AttentionTile* next,
                 const Buffers& b, int64_t start, const PartOf& part_of, const Done& done) {
  const int64_t num_keys = min(kKeyTile, tile.end - start);
  Words32 keys;
  Words32 values;
  if (args.block_size % kGroup == 0 && args.head_dim % kGroup == 0) {
    find_groups<T>(args, tile, next, start, tile.end - start, keys, values);
  } else {
    gather<T>(args, tile, b, start, num_keys, keys, values);
  }
  const Sight tokens = tokens_that_see(args, tile, start, start + num_keys);
  const int64_t end_row = tokens.end * args.group();
  for (int64_t row = tokens.begin * args.group(); row < end_row;) {
    with_rows<kMaxRows>(end_row - row, [&]<int kRows>(std::integral_constant<int, kRows>) {
      attend_rows<T, kRows>(args, tile, b, keys, values, start, num_keys, row, part_of(row));
      done(row, kRows);
      row += kRows;
    });
  }
}

template <typename T>
void store_rows(const PagedAttention& args, const AttentionTile& tile, const Parts& all) {
  const int64_t group = args.group();
  const int64_t width = padded(args.head_dim);
  for (int64_t row = 0; row < tile.num_tokens * group; ++row) {
    const int64_t head = tile.kv_head * group + row % group;
    const int64_t token = tile.first_token + row / group;
    T* out = static_cast<T*>(args.out) + (token * args.num_heads + head) * args.head_dim;
    for (int64_t d = 0; d < args.head_dim; d += kLanes) {
      // A row's first part is merged or taken as it is, as other rows want: -0 becomes 0 in both.
      const Floats sum = load(all.sums + row * width + d) + Floats{};
      store_first(out + d, sum / splat(all.masses[row]), args.head_dim - d);
    }
  }
}

}  // namespace

int64_t attention_scratch_floats(const PagedAttention& args) {
  const int64_t width = padded(args.head_dim);
  return max_rows(args) * width + 2 * kKeyTile * width + kMaxRows * kScoreStride +
         parts_floats(args, kMaxRows) + parts_floats(args, max_rows(args));
}

int64_t attention_part_floats(const PagedAttention& args, const AttentionTile& tile) {
  return parts_floats(args, tile.num_tokens * args.group());
}

void attend(DType dtype, const PagedAttention& args, const AttentionTile& tile,
            const AttentionTile* next, float* scratch) {
  const Buffers b = carve(args, scratch);
  const int64_t num_rows = tile.num_tokens * args.group();
  clear(args, b.all, num_rows);
  visit(dtype, [&]<typename T>(T*) {
    load_queries<T>(args, tile, b.queries);
    const int64_t first = tile.begin / kKeyTile * kKeyTile;
    for (int64_t start = first; start < tile.end; start += kKeyTile) {
      attend_keys<T>(
          args, tile, next, b, start,
          [&](int64_t row) { return start == first ? rows_from(args, b.all, row) : b.part; },
          [&](int64_t row, int64_t rows) {
            if (start != first) merge<T>(args, b.part, rows, rows_from(args, b.all, row));
          });
    }
    store_rows<T>(args, tile, b.all);
  });
}

void attend_part(DType dtype, const PagedAttention& args, const AttentionTile& tile, int64_t index,
                 float* part, float* scratch) {
  const Buffers b = carve(args, scratch);
  const int64_t num_rows = tile.num_tokens * args.group();
  const Parts parts = carve_parts(args, num_rows, part);
  clear(args, parts, num_rows);
  visit(dtype, [&]<typename T>(T*) {
    load_queries<T>(args, tile, b.queries);
    attend_keys<T>(
        args, tile, nullptr, b, (tile.begin / kKeyTile + index) * kKeyTile,
        [&](int64_t row) { return rows_from(args, parts, row); }, [](int64_t, int64_t) {});
  });
}

void merge_parts(DType dtype, const PagedAttention& args, const AttentionTile& tile, float* parts) {
  const int64_t num_rows = tile.num_tokens * args.group();
  const Parts all = carve_parts(args, num_rows, parts);
  visit(dtype, [&]<typename T>(T*) {
    for (int64_t i = 1; i < tile.num_key_tiles(); ++i) {
      float* part = parts + i * parts_floats(args, num_rows);
      merge<T>(args, carve_parts(args, num_rows, part), num_rows, all);
    }
    store_rows<T>(args, tile, all);
  });
}

}  // namespace airside::cpu::AIRSIDE_ISA
