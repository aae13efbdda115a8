#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "engine/scheduler.h"
#include "engine/types.h"

namespace airside {

// The part of one image's embeddings that a step needs.
struct ImageSlice {
  SeqId seq_id;
  std::int32_t image_index;
  std::int32_t embed_start;
  std::int32_t embed_count;
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
  std::map<std::int32_t, std::vector<TokenId>> banned;

  std::vector<ImageSlice> images;
};

// `image_token_id`: the token whose positions are embeddings of images, if the model has one.
StepPlan MakeStepPlan(StepId step_id, const std::vector<Row>& rows,
                      std::optional<TokenId> image_token_id);

}  // namespace airside
