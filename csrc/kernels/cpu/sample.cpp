#include <algorithm>
#include <cmath>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include "kernels/cpu/kernels.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/philox.h"
#include "kernels/cpu/top_k.h"
#include "kernels/cpu/weights.h"

namespace airside::cpu {
namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();
constexpr int32_t kNoToken = -1;  // of a row in which no id has a probability

// Kept by each thread, so that a step allocates nothing.
struct Workspace {
  TopK top_k;
  std::vector<float> weights;  // exp((logit - top) / temperature) of each id that may be drawn
  std::vector<float> chunk_sums;
  std::vector<int32_t> heavy;
};

Workspace& workspace() {
  thread_local Workspace w;
  return w;
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
  if (has_top_k) w.top_k.select(vocabulary, k);
  const std::span<const float> logits = has_top_k ? w.top_k.logits() : vocabulary;
  w.weights.resize(logits.size());
  const std::span<float> weights(w.weights);
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
  return has_top_k ? w.top_k.ids()[drawn] : static_cast<int32_t>(drawn);
}

}  // namespace

void sample(const Sample& args) {
  AIRSIDE_ISA::parallel_for(args.num_rows, args.vocab, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) args.out[row] = sample_row(args, row);
  });
}

}  // namespace airside::cpu
