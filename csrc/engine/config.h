#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "engine/types.h"

namespace airside {

// What becomes of a running sequence whose blocks are needed by one ahead of it.
enum class PreemptionPolicy { kRecompute, kStop };

struct EngineConfig {
  int num_blocks = 0;
  int block_size = 0;              // tokens
  int max_num_seqs = 0;            // rows of one step, and sequences running at once
  int max_num_batched_tokens = 0;  // tokens of one step
  int max_model_len = 0;           // prompt and output together
  bool enable_chunked_prefill = true;
  bool prefill_first = false;
  bool strict_fifo = false;
  PreemptionPolicy preemption = PreemptionPolicy::kRecompute;
  std::optional<TokenId> image_token_id;
  int max_queued_requests = 256;
  std::int64_t max_queued_tokens = 200'000;
  std::optional<TokenId> vocab_size;  // token ids are in [0, vocab_size); none: unchecked

  std::int64_t PoolTokens() const { return std::int64_t{num_blocks} * block_size; }

  // The longest that prompt and output of one sequence can get.
  std::int64_t SequenceTokensMax() const;

  // Blocks that an admission leaves free, so that running sequences can grow for a while before
  // one of them is preempted: one in a hundred, and at least one.
  int WatermarkBlocks() const { return (num_blocks + 99) / 100; }
};

// Throws std::invalid_argument naming the first value that makes no sense.
void Validate(const EngineConfig& config);

// "recompute" or "stop"; throws std::invalid_argument on anything else.
PreemptionPolicy ParsePreemptionPolicy(std::string_view name);
std::string_view Name(PreemptionPolicy policy);

}  // namespace airside
