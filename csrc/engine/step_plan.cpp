#include "engine/step_plan.h"

#include <algorithm>

namespace airside {
namespace {

void AddImages(const Row& row, TokenId image_token_id, std::vector<ImageSlice>& to) {
  const Sequence& sequence = *row.sequence;
  const auto& prompt = sequence.input.prompt;
  const std::int32_t begin = sequence.cache.num_computed;
  const std::int32_t end = begin + row.num_new;
  const auto embeddings_in = [&](std::int32_t from, std::int32_t until) {
    return static_cast<std::int32_t>(
        std::count(prompt.begin() + from, prompt.begin() + until, image_token_id));
  };
  std::int32_t index = -1;
  for (const Image& image : sequence.input.images) {
    ++index;
    //   image:         begin ...........xxxxxxxxxxxx......... end
    //   chunk:                    begin ............ end
    const std::int32_t from = std::max(begin, image.begin);
    const std::int32_t until = std::min(end, image.end);
    if (from >= until) continue;
    const std::int32_t count = embeddings_in(from, until);
    if (count == 0) continue;
    to.push_back({sequence.request.id, index, embeddings_in(image.begin, from), count});
  }
}

// A token that only pictures may bring would be taken for one if the model made it. An end is out
// of the question before the least number of tokens is reached.
void AddBanned(const Sequence& sequence, std::int32_t sampled_row,
               std::optional<TokenId> image_token_id, StepPlan& plan) {
  const Sequence::Generation& generation = sequence.generation;
  std::vector<TokenId> banned;
  if (static_cast<std::int64_t>(sequence.output.tokens.size()) < generation.tokens_min) {
    banned = generation.stop_token_ids;
  }
  if (image_token_id) banned.push_back(*image_token_id);
  if (!banned.empty()) plan.banned.emplace(sampled_row, std::move(banned));
}

void AddSampling(const Sequence& sequence, StepPlan& plan) {
  const Sampling& sampling = sequence.generation.sampling;
  plan.temperature.push_back(sampling.temperature);
  plan.top_k.push_back(sampling.top_k);
  plan.top_p.push_back(sampling.top_p);
  plan.min_p.push_back(sampling.min_p);
  plan.seed.push_back(sampling.seed);
  plan.position.push_back(static_cast<std::int64_t>(sequence.output.tokens.size()));
}

}  // namespace

StepPlan MakeStepPlan(StepId step_id, const std::vector<Row>& rows,
                      std::optional<TokenId> image_token_id) {
  StepPlan plan;
  plan.step_id = step_id;
  for (const Row& row : rows) {
    const Sequence& sequence = *row.sequence;
    const std::int32_t begin = sequence.cache.num_computed;
    const auto& blocks = sequence.cache.blocks;
    plan.seq_ids.push_back(sequence.request.id);
    plan.num_computed.push_back(begin);
    plan.num_new.push_back(row.num_new);
    sequence.AppendTokens(begin, begin + row.num_new, plan.token_ids);
    plan.num_blocks.push_back(static_cast<std::int32_t>(blocks.size()));
    plan.block_tables.insert(plan.block_tables.end(), blocks.begin(), blocks.end());
    plan.sampled.push_back(row.ReachesEnd() ? 1 : 0);
    if (row.ReachesEnd()) {
      AddBanned(sequence, static_cast<std::int32_t>(plan.seed.size()), image_token_id, plan);
      AddSampling(sequence, plan);
    }
    if (image_token_id) AddImages(row, *image_token_id, plan.images);
  }
  return plan;
}

}  // namespace airside
