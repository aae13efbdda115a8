#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include "kernels/cpu/kernels.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/philox.h"

namespace airside::cpu {
namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();
constexpr int32_t kNoToken = -1;  // of a row in which no id has a probability

// The ids that may still be drawn, in ascending order, with their logits and weights exp((logit -
// top) / temperature).
struct Candidates {
  std::vector<int32_t> ids;
  std::vector<float> logits;
  std::vector<float> weights;

  void clear() {
    ids.clear();
    logits.clear();
  }
  void push_back(int32_t id, float logit) {
    ids.push_back(id);
    logits.push_back(logit);
  }
  int64_t size() const { return static_cast<int64_t>(logits.size()); }
};

// Kept by each thread, so that a step allocates nothing.
struct Workspace {
  Candidates candidates;
  std::vector<float> block_tops;
  std::vector<float> sorted;
  std::vector<float> chunk_sums;
  std::vector<int32_t> heavy;
};

Workspace& workspace() {
  thread_local Workspace w;
  return w;
}

float kth_largest(std::vector<float>& values, int64_t k) {
  std::nth_element(values.begin(), values.begin() + (k - 1), values.end(), std::greater<>());
  return values[k - 1];
}

// ---- top k

constexpr int64_t kBlock = 64;

// Collects all ids whose logit reaches a bound that at least k of them reach: the k-th largest of
// the largest logits of blocks of the vocabulary. Few others do, so what follows need not look at
// the vocabulary again.
void collect(std::span<const float> logits, int64_t k, Workspace& w) {
  const int64_t vocab = static_cast<int64_t>(logits.size());
  const int64_t num_blocks = (vocab + kBlock - 1) / kBlock;
  w.block_tops.resize(num_blocks);
  for (int64_t b = 0; b < num_blocks; ++b) {
    w.block_tops[b] =
        kernels().largest(logits.data() + b * kBlock, std::min(kBlock, vocab - b * kBlock));
  }
  w.sorted = w.block_tops;
  const float bound = k <= num_blocks ? kth_largest(w.sorted, k) : kNone;
  w.candidates.clear();
  for (int64_t b = 0; b < num_blocks; ++b) {
    if (w.block_tops[b] < bound) continue;
    for (int64_t id = b * kBlock; id < std::min(vocab, (b + 1) * kBlock); ++id) {
      if (logits[id] >= bound && logits[id] > kNone)
        w.candidates.push_back(static_cast<int32_t>(id), logits[id]);
    }
  }
}

// Keeps the k largest; of equals at the edge, those with the lowest ids.
void keep_top_k(Candidates& candidates, int64_t k, std::vector<float>& sorted) {
  if (candidates.size() <= k) return;
  sorted = candidates.logits;
  const float edge = kth_largest(sorted, k);
  int64_t equals_left =
      k - std::count_if(sorted.begin(), sorted.end(), [&](float x) { return x > edge; });
  int64_t kept = 0;
  for (int64_t i = 0; i < candidates.size(); ++i) {
    const float logit = candidates.logits[i];
    if (logit < edge || (logit == edge && equals_left-- <= 0)) continue;
    candidates.ids[kept] = candidates.ids[i];
    candidates.logits[kept++] = logit;
  }
  candidates.ids.resize(kept);
  candidates.logits.resize(kept);
}

// ---- top p

// Buckets of logits below the top, each 1/32 of a unit of log probability wide; the last takes the
// rest.
constexpr int kBuckets = 1024;
constexpr float kBucketsPerUnit = 32.0f;

struct Nucleus {
  std::span<const float> logits;
  std::span<float> weights;
  float top;
  float temperature;
  double wanted;  // the mass to reach

  int bucket(int64_t i) const {
    const float depth = (top - logits[i]) / temperature * kBucketsPerUnit;
    return depth < kBuckets - 1 ? static_cast<int>(depth) : kBuckets - 1;
  }
};

// Removes the weights so small that all of them together are less than the mass that may be
// missing, and lists the others in `room`. Half of that bound leaves room for the rounding of the
// sums. Without branches: which weights are heavy is as good as random to the processor.
std::span<int32_t> list_heavy(const Nucleus& nucleus, double total, std::vector<int32_t>& room) {
  const auto count = static_cast<int32_t>(nucleus.weights.size());
  const auto bound = static_cast<float>(0.5 * (total - nucleus.wanted) / count);
  if (room.size() < nucleus.weights.size()) room.resize(nucleus.weights.size());
  size_t num_heavy = 0;
  for (int32_t i = 0; i < count; ++i) {
    float& weight = nucleus.weights[i];
    const bool heavy = (weight > 0.0f) & (weight >= bound);
    room[num_heavy] = i;
    num_heavy += heavy;
    weight = heavy ? weight : 0.0f;
  }
  return {room.data(), num_heavy};
}

// The bucket in which the mass of the buckets so far reaches what is wanted, and the mass before
// it.
std::pair<int, double> find_edge(const Nucleus& nucleus, std::span<const int32_t> heavy) {
  double masses[kBuckets] = {};
  for (const int32_t i : heavy) masses[nucleus.bucket(i)] += nucleus.weights[i];
  double before = 0.0;
  for (int bucket = 0; bucket < kBuckets - 1; ++bucket) {
    if (before + masses[bucket] >= nucleus.wanted) return {bucket, before};
    before += masses[bucket];
  }
  return {kBuckets - 1, before};
}

// Removes the weights beyond the bucket at the edge, and moves its own candidates to the front of
// `heavy`.
std::span<int32_t> cut_at(int edge, const Nucleus& nucleus, std::span<int32_t> heavy) {
  size_t num_at_edge = 0;
  for (const int32_t i : heavy) {
    const int bucket = nucleus.bucket(i);
    nucleus.weights[i] = bucket > edge ? 0.0f : nucleus.weights[i];
    heavy[num_at_edge] = i;
    num_at_edge += bucket == edge;
  }
  return heavy.first(num_at_edge);
}

// Removes the weights outside the smallest set of the largest that has the wanted mass. Only the
// bucket at its edge is sorted; the candidate with the top logit stays, whatever is wanted.
void keep_nucleus(const Nucleus& nucleus, double total, std::vector<int32_t>& room) {
  const std::span<int32_t> heavy = list_heavy(nucleus, total, room);
  const auto [edge, before] = find_edge(nucleus, heavy);
  const std::span<int32_t> at_edge = cut_at(edge, nucleus, heavy);
  std::sort(at_edge.begin(), at_edge.end(), [&](int32_t i, int32_t j) {
    return nucleus.logits[i] != nucleus.logits[j] ? nucleus.logits[i] > nucleus.logits[j] : i < j;
  });
  double mass = before;
  for (const int32_t i : at_edge) {
    const float weight = nucleus.weights[i];
    if (mass >= nucleus.wanted && mass > 0.0) nucleus.weights[i] = 0.0f;
    mass += weight;
  }
}

// ---- the draw

double sum(std::span<const float> weights, std::vector<float>& chunk_sums) {
  chunk_sums.resize((weights.size() + kWeightChunk - 1) / kWeightChunk);
  kernels().sum_chunks(weights.data(), static_cast<int64_t>(weights.size()), chunk_sums.data());
  double total = 0.0;
  for (const float chunk : chunk_sums) total += chunk;
  return total;
}

// The index at which the running sum of weights first passes `target`; the last one with a weight,
// if rounding lets none pass.
int64_t draw(std::span<const float> weights, std::span<const float> chunk_sums, double target) {
  double before = 0.0;
  size_t chunk = 0;
  size_t last_filled = 0;
  for (; chunk < chunk_sums.size() && before + chunk_sums[chunk] <= target; ++chunk) {
    if (chunk_sums[chunk] > 0.0f) last_filled = chunk;
    before += chunk_sums[chunk];
  }
  if (chunk == chunk_sums.size()) chunk = last_filled;
  const int64_t begin = static_cast<int64_t>(chunk) * kWeightChunk;
  const int64_t end = std::min(begin + kWeightChunk, static_cast<int64_t>(weights.size()));
  int64_t last = begin;
  for (int64_t i = begin; i < end; ++i) {
    if (weights[i] <= 0.0f) continue;
    last = i;
    before += weights[i];
    if (before > target) break;
  }
  return last;
}

// ---- one row

int32_t first_of(std::span<const float> logits, float value) {
  return static_cast<int32_t>(std::find(logits.begin(), logits.end(), value) - logits.begin());
}

int32_t sample_row(const Sample& args, int64_t row) {
  const std::span<const float> vocabulary(args.logits + row * args.logits_stride, args.vocab);
  const float temperature = args.temperature[row];
  const float top = kernels().largest(vocabulary.data(), args.vocab);
  if (top == kNone) return kNoToken;
  // An infinite top is the whole mass, and the lowest id has it.
  if (!(temperature > 0.0f) || std::isinf(top)) return first_of(vocabulary, top);

  Workspace& w = workspace();
  const int64_t k = args.top_k[row];
  const bool has_top_k = k > 0 && k < args.vocab;
  if (has_top_k) {
    collect(vocabulary, k, w);
    keep_top_k(w.candidates, k, w.sorted);
  }
  const std::span<const float> logits =
      has_top_k ? std::span<const float>(w.candidates.logits) : vocabulary;
  w.candidates.weights.resize(logits.size());
  const std::span<float> weights(w.candidates.weights);
  kernels().weigh(logits.data(), static_cast<int64_t>(logits.size()), top, temperature,
                  weights.data());

  double total = sum(weights, w.chunk_sums);
  const float top_p = std::max(args.top_p[row], 0.0f);
  const float min_p = std::min(args.min_p[row], 1.0f);  // the largest always stays: its weight is 1
  if (top_p < 1.0f)
    keep_nucleus({logits, weights, top, temperature, top_p * total}, total, w.heavy);
  if (min_p > 0.0f) {
    for (float& weight : weights) weight = weight < min_p ? 0.0f : weight;
  }
  if (top_p < 1.0f || min_p > 0.0f) total = sum(weights, w.chunk_sums);

  const double u =
      uniform(static_cast<uint64_t>(args.seed[row]), static_cast<uint64_t>(args.position[row]));
  const int64_t drawn = draw(weights, w.chunk_sums, u * total);
  return has_top_k ? w.candidates.ids[drawn] : static_cast<int32_t>(drawn);
}

}  // namespace

void sample(const Sample& args) {
  AIRSIDE_ISA::parallel_for(args.num_rows, args.vocab, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) args.out[row] = sample_row(args, row);
  });
}

}  // namespace airside::cpu
