#include "kernels/cpu/top_k.h"

#include <algorithm>
#include <functional>
#include <limits>

#include "kernels/cpu/kernels.h"

namespace airside::cpu {
namespace {

constexpr int64_t kBlock = 64;
constexpr float kNone = -std::numeric_limits<float>::infinity();

float kth_largest(std::vector<float>& values, int64_t k) {
  std::nth_element(values.begin(), values.begin() + (k - 1), values.end(), std::greater<>());
  return values[k - 1];
}

}  // namespace

void TopK::select(std::span<const float> logits, int64_t k) {
  ids_.clear();
  logits_.clear();
  if (k <= 0) return;
  collect(logits, k);
  keep(k);
}

// Collects all ids whose logit reaches a bound that at least k of them reach: the k-th largest of
// the largest logits of blocks of the vocabulary. Few others do, so what follows need not look at
// the vocabulary again.
void TopK::collect(std::span<const float> logits, int64_t k) {
  const int64_t vocab = static_cast<int64_t>(logits.size());
  const int64_t num_blocks = (vocab + kBlock - 1) / kBlock;
  block_tops_.resize(num_blocks);
  for (int64_t b = 0; b < num_blocks; ++b) {
    block_tops_[b] =
        kernels().largest(logits.data() + b * kBlock, std::min(kBlock, vocab - b * kBlock));
  }
  sorted_ = block_tops_;
  const float bound = k <= num_blocks ? kth_largest(sorted_, k) : kNone;
  for (int64_t b = 0; b < num_blocks; ++b) {
    if (block_tops_[b] < bound) continue;
    for (int64_t id = b * kBlock; id < std::min(vocab, (b + 1) * kBlock); ++id) {
      if (logits[id] >= bound && logits[id] > kNone) {
        ids_.push_back(static_cast<int32_t>(id));
        logits_.push_back(logits[id]);
      }
    }
  }
}

void TopK::keep(int64_t k) {
  const auto count = static_cast<int64_t>(ids_.size());
  if (count <= k) return;
  sorted_ = logits_;
  const float edge = kth_largest(sorted_, k);
  int64_t equals_left =
      k - std::count_if(sorted_.begin(), sorted_.end(), [&](float x) { return x > edge; });
  int64_t kept = 0;
  for (int64_t i = 0; i < count; ++i) {
    const float logit = logits_[i];
    if (logit < edge || (logit == edge && equals_left-- <= 0)) continue;
    ids_[kept] = ids_[i];
    logits_[kept++] = logit;
  }
  ids_.resize(kept);
  logits_.resize(kept);
}

}  // namespace airside::cpu
