#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <span>
#include <vector>

#include "kernels/cpu/kernels.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/top_k.h"
#include "kernels/cpu/weights.h"

namespace airside::cpu {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

// Kept by each thread, so that a step allocates nothing.
struct Workspace {
  std::vector<float> weights;
  std::vector<float> chunk_sums;
  TopK top_k;
  std::vector<int64_t> order;
};

Workspace& workspace() {
  thread_local Workspace w;
  return w;
}

// exp(logit - top) of each; where the top is infinite, all those that reach it have the mass.
void weigh(std::span<const float> logits, float top, std::span<float> weights) {
  if (std::isinf(top)) {
    for (size_t i = 0; i < logits.size(); ++i) weights[i] = logits[i] == top && top > 0.0f;
  } else {
    kernels().weigh(logits.data(), static_cast<int64_t>(logits.size()), top, 1.0f, weights.data());
  }
}

// A row's distribution: log p(logit) = (logit - top) - log_total.
struct Distribution {
  float top;
  double log_total;

  float logprob(float logit) const {
    if (logit == top) return static_cast<float>(top > -kInf ? -log_total : -kInf);
    return logit < top ? static_cast<float>((double{logit} - double{top}) - log_total) : -kInf;
  }
};

// Largest first, of equals the lower id; -1 and -inf where there are fewer ids with a probability.
void write_top(const TokenLogprobs& args, int64_t row, std::span<const float> logits,
               const Distribution& distribution, Workspace& w) {
  w.top_k.select(logits, args.k);
  const std::span<const int32_t> ids = w.top_k.ids();
  const std::span<const float> values = w.top_k.logits();
  w.order.resize(ids.size());
  std::iota(w.order.begin(), w.order.end(), 0);
  std::stable_sort(w.order.begin(), w.order.end(),
                   [&](int64_t i, int64_t j) { return values[i] > values[j]; });
  for (int64_t i = 0; i < args.k; ++i) {
    const bool is_there = i < static_cast<int64_t>(ids.size());
    args.top_ids[row * args.k + i] = is_there ? ids[w.order[i]] : -1;
    args.top_logprobs[row * args.k + i] =
        is_there ? distribution.logprob(values[w.order[i]]) : -kInf;
  }
}

void score_row(const TokenLogprobs& args, int64_t row) {
  Workspace& w = workspace();
  const std::span<const float> logits(args.logits + row * args.logits_stride, args.vocab);
  const float top = kernels().largest(logits.data(), args.vocab);
  w.weights.resize(logits.size());
  const std::span<float> weights(w.weights);
  weigh(logits, top, weights);
  const double total = sum(weights, w.chunk_sums);
  const Distribution distribution{top, std::log(total)};

  const float target = logits[args.targets[row]];
  args.logprobs[row] = distribution.logprob(target);
  for (size_t i = 0; i < logits.size(); ++i) {
    weights[i] = logits[i] < target ? weights[i] : 0.0f;
  }
  const double smaller = sum(weights, w.chunk_sums);
  args.sums_smaller[row] = static_cast<float>(total > 0.0 ? smaller / total : 0.0);
  write_top(args, row, logits, distribution, w);
}

}  // namespace

void token_logprobs(const TokenLogprobs& args) {
  AIRSIDE_ISA::parallel_for(args.num_rows, 2 * args.vocab, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) score_row(args, row);
  });
}

}  // namespace airside::cpu
