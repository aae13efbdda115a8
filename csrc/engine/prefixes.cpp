#include "engine/prefixes.h"

#include <algorithm>
#include <cstddef>

namespace airside {

std::span<const BlockKey> Prefixes::FindHits(Sequence& sequence, bool as_if_encoded) {
  if (!LooksUp(sequence)) return {};
  const std::int32_t ready = sequence.ReadyLength(as_if_encoded);
  const std::int32_t tokens_max = std::min(sequence.Length(), ready) - 1;
  const std::int32_t num_blocks = tokens_max / config_.block_size;
  if (num_blocks <= 0) return {};
  ExtendKeys(sequence, num_blocks);
  const std::span<const BlockKey> keys(sequence.keys.data(), num_blocks);
  return keys.first(blocks_.CountHits(keys));
}

void Prefixes::Publish(Sequence& sequence) {
  if (!config_.enable_prefix_caching) return;
  Sequence::Cache& cache = sequence.cache;
  const bool state_beside = config_.num_state_slots > 0;
  const std::int32_t written = state_beside ? cache.num_computed : sequence.NumPlanned();
  const std::int32_t num_full = std::min(sequence.Length(), written) / config_.block_size;
  if (num_full <= cache.num_published) return;
  ExtendKeys(sequence, num_full);
  for (; cache.num_published < num_full; ++cache.num_published) {
    blocks_.Publish(cache.blocks[cache.num_published], sequence.keys[cache.num_published]);
  }
}

void Prefixes::ExtendKeys(Sequence& sequence, std::int32_t num_blocks) {
  std::vector<BlockKey>& keys = sequence.keys;
  while (static_cast<std::int32_t>(keys.size()) < num_blocks) {
    const auto begin = static_cast<std::int32_t>(keys.size()) * config_.block_size;
    contents_.clear();
    for (std::int32_t position = begin; position < begin + config_.block_size; ++position) {
      contents_.push_back(sequence.ContentOf(position, config_.image_token_id));
    }
    const BlockKey before = keys.empty() ? RootKey(sequence.input.salt) : keys.back();
    keys.push_back(NextKey(before, contents_));
  }
}

}  // namespace airside
