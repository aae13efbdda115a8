#include "engine/config.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace airside {
namespace {

void AtLeast(std::int64_t least, std::int64_t value, const char* name) {
  if (value < least) {
    throw std::invalid_argument(std::string(name) + " is " + std::to_string(value) +
                                ", but must be at least " + std::to_string(least));
  }
}

}  // namespace

std::int64_t EngineConfig::SequenceTokensMax() const {
  return std::min<std::int64_t>(max_model_len, PoolTokens());
}

void Validate(const EngineConfig& config) {
  AtLeast(1, config.num_blocks, "num_blocks");
  AtLeast(1, config.block_size, "block_size");
  AtLeast(1, config.max_num_seqs, "max_num_seqs");
  AtLeast(1, config.max_num_batched_tokens, "max_num_batched_tokens");
  AtLeast(2, config.max_model_len, "max_model_len");
  AtLeast(1, config.max_queued_requests, "max_queued_requests");
  AtLeast(1, config.max_queued_tokens, "max_queued_tokens");
  if (config.vocab_size) AtLeast(1, *config.vocab_size, "vocab_size");
}

PreemptionPolicy ParsePreemptionPolicy(std::string_view name) {
  if (name == "recompute") return PreemptionPolicy::kRecompute;
  if (name == "stop") return PreemptionPolicy::kStop;
  throw std::invalid_argument("preemption is \"" + std::string(name) +
                              "\", but must be \"recompute\" or \"stop\"");
}

std::string_view Name(PreemptionPolicy policy) {
  return policy == PreemptionPolicy::kRecompute ? "recompute" : "stop";
}

}  // namespace airside
