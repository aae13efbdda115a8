#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace airside::cpu {

// The k ids of the largest logits, in ascending order of id. Of equals at the edge those with the
// lowest ids; logits of -inf and NaN never. Keeps its memory from one selection to the next.
class TopK {
 public:
  void select(std::span<const float> logits, int64_t k);

  std::span<const int32_t> ids() const { return ids_; }
  std::span<const float> logits() const { return logits_; }

 private:
  void collect(std::span<const float> logits, int64_t k);
  void keep(int64_t k);

  std::vector<int32_t> ids_;
  std::vector<float> logits_;
  std::vector<float> block_tops_;
  std::vector<float> sorted_;
};

}  // namespace airside::cpu
