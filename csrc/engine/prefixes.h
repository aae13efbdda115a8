#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/block_key.h"
#include "engine/block_manager.h"
#include "engine/config.h"
#include "engine/sequence.h"

namespace airside {

// What sequences find in the prefix cache, and leave in it.
class Prefixes {
 public:
  Prefixes(const EngineConfig& config, BlockManager& blocks) : config_(config), blocks_(blocks) {}

  // Keys of the leading blocks that the cache has for the sequence, were nothing computed. What is
  // left is never nothing: the last token that may be computed, as in ReadyLength, is always
  // computed.
  std::span<const BlockKey> FindHits(Sequence& sequence, bool as_if_encoded = false);

  // Whether FindHits looks at all. Log-probabilities of a prompt come of computing it.
  bool LooksUp(const Sequence& sequence) const {
    return config_.enable_prefix_caching && sequence.input.logprobs < 0;
  }

  // Tells the keys of its full blocks of known tokens. Blocks that a step in flight will fill
  // count as full, since steps are executed in order, and each layer writes before it reads; but
  // not where a state must be beside them, which a row of the same step would read too early.
  void Publish(Sequence& sequence);

 private:
  void ExtendKeys(Sequence& sequence, std::int32_t num_blocks);

  const EngineConfig& config_;
  BlockManager& blocks_;
  std::vector<std::uint64_t> contents_;  // of one block
};

}  // namespace airside
