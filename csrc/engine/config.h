#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "engine/types.h"

namespace airside {

// What becomes of a running sequence whose blocks are needed by one ahead of it.
enum class PreemptionPolicy { kRecompute, kStop };

// Whose blocks are taken, of those behind the taker.
enum class VictimRule {
  kLeastWaste,  // fewest tokens to compute again per block gained
  kMostOutput,  // who has made the most tokens
  kLast,        // the last in order
};

// Who proposes draft tokens.
enum class DraftMethod {
  kNone,
  kNgram,  // the engine: what followed the last tokens when they occurred before
  kMtp,    // the workers: the model's draft head
};

struct EngineConfig {
  int num_blocks = 0;
  int block_size = 0;              // tokens
  int max_num_seqs = 0;            // rows of one step, and sequences running at once
  int max_num_batched_tokens = 0;  // tokens of one step
  int max_num_mixed_tokens = 0;    // of one in which somebody decodes; 0: as of any
  int max_model_len = 0;           // prompt and output together
  bool enable_chunked_prefill = true;
  bool prefill_first = false;
  bool strict_fifo = false;
  PreemptionPolicy preemption = PreemptionPolicy::kRecompute;
  VictimRule victim_rule = VictimRule::kLeastWaste;
  bool enable_prefix_caching = true;
  bool async_scheduling = true;  // a step is planned while the one before it is computed
  DraftMethod draft_method = DraftMethod::kNone;
  int max_draft_tokens = 0;  // per sequence and step, whoever proposes them
  int num_state_slots = 0;   // 0: the model keeps no fixed-size state
  int tail_tokens = 0;       // tokens before each row that the plan tells
  std::optional<TokenId> image_token_id;
  std::optional<TokenId> image_mark_id;  // stands for an image in a request; none: the image token
  bool atomic_images = false;  // an image's tokens that follow one another come in one step
  int max_queued_requests = 256;
  std::int64_t max_queued_tokens = 200'000;
  std::optional<TokenId> vocab_size;  // token ids are in [0, vocab_size); none: unchecked

  std::int64_t PoolTokens() const { return std::int64_t{num_blocks} * block_size; }

  // The longest that prompt and output of one sequence can get.
  std::int64_t SequenceTokensMax() const;

  // Blocks that an admission leaves free, so that running sequences can grow for a while before
  // one of them is preempted: one in a hundred, and at least one.
  int WatermarkBlocks() const { return (num_blocks + 99) / 100; }

  // Whether prompts get less of a step in which somebody decodes, and waits for all of it. Prompts
  // and images that come whole would never fit.
  bool LimitsMixedSteps() const {
    return max_num_mixed_tokens > 0 && enable_chunked_prefill && !atomic_images;
  }

  int StepsInFlightMax() const { return async_scheduling ? 2 : 1; }

  std::optional<TokenId> MarkId() const { return image_mark_id ? image_mark_id : image_token_id; }

  // Whether images may be encoded in steps before those that read them: see encode_ahead.cpp.
  // Whole prompts cannot end before an image; under prefill_first nobody decodes beside them; and
  // in strict order nobody may pass one that waits for a step.
  bool MayEncodeAhead() const {
    return image_token_id && enable_chunked_prefill && !prefill_first && !strict_fifo;
  }

  // A token that only requests and their images may bring: it would be taken for an image.
  bool StandsForImage(TokenId token) const {
    return token == image_token_id || token == image_mark_id;
  }
};

// Throws std::invalid_argument naming the first value that makes no sense.
void Validate(const EngineConfig& config);

// By the names that the bindings list; throw std::invalid_argument on anything else.
PreemptionPolicy ParsePreemptionPolicy(std::string_view name);
VictimRule ParseVictimRule(std::string_view name);
DraftMethod ParseDraftMethod(std::string_view name);

std::string_view Name(PreemptionPolicy policy);
std::string_view Name(VictimRule rule);
std::string_view Name(DraftMethod method);

}  // namespace airside
