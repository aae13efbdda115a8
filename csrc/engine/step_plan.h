#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "engine/config.h"
#include "engine/request.h"
#include "engine/sequence.h"
#include "engine/step.h"
#include "engine/types.h"

namespace airside {

class Drafter;

// The part of one image's embeddings that a step needs.
struct ImageSlice {
  SeqId seq_id;
  std::int32_t image_index;
  std::int32_t embed_start;
  std::int32_t embed_count;
};

// Prompt positions of which records are wanted: those of the row's tokens from `start`, of the
// tokens that follow them, `targets`.
struct PromptScores {
  std::int32_t row;
  std::int32_t start;
  std::int32_t alternatives;
  std::vector<TokenId> targets;
};

// What the sampler must know of a sequence beyond the columns.
struct Opened {
  SeqId seq_id;
  std::int32_t num_prompt_tokens;
  std::vector<TokenId> token_ids;  // all that are known
  LogitRules logit_rules;
};

// What the workers are told of one step; columns as in the bus message of the same name.
struct StepPlan {
  StepId step_id{};

  // One entry per row.
  std::vector<SeqId> seq_ids;
  std::vector<std::int32_t> num_computed;
  std::vector<std::int32_t> num_new;
  std::vector<std::int32_t> num_blocks;
  std::vector<std::uint8_t> sampled;

  std::vector<TokenId> token_ids;     // [sum(num_new)]
  std::vector<BlockId> block_tables;  // [sum(num_blocks)]

  // One entry per row that is sampled.
  std::vector<float> temperature;
  std::vector<std::int32_t> top_k;
  std::vector<float> top_p;
  std::vector<float> min_p;
  std::vector<std::uint64_t> seed;
  std::vector<std::int64_t> position;
  std::map<std::int32_t, std::vector<TokenId>> banned;  // by sampled position

  std::vector<ImageSlice> images;
  std::vector<ImageId> ahead;  // encoded for later steps

  // Empty where no row has anything to say.
  std::vector<TokenId> forced;              // per sampled position; -1: none
  std::vector<std::int32_t> logprobs;       // per row that is sampled; -1: none
  std::vector<std::uint8_t> structured;     // per row that is sampled
  std::vector<std::int32_t> drafts_wanted;  // per row that is sampled
  std::vector<PromptScores> prompt_logprobs;
  std::vector<Opened> opened;
  std::vector<SeqId> closed;                  // comes before `opened`: an id may be used again
  std::vector<std::int32_t> state_slots;      // per row
  std::vector<BlockId> state_from;            // per row; -1: none
  std::vector<TokenId> tail_ids;              // [rows * tail_tokens]; -1: before the start
  std::vector<std::int32_t> position_shifts;  // per row: of the pictures before it
};

// `closed`: those opened before that have ended since the last plan.
StepPlan MakeStepPlan(const Step& step, const EngineConfig& config, const Drafter& drafter,
                      std::vector<SeqId> closed);

}  // namespace airside
