#include "engine/step_plan.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "engine/drafter.h"

namespace airside {
namespace {

// Makes a plan of a step, row by row.
class PlanBuilder {
 public:
  PlanBuilder(const Step& step, const EngineConfig& config, const Drafter& drafter)
      : step_(step), config_(config), drafter_(drafter) {
    plan_.step_id = step.id;
    plan_.ahead = step.ahead;
    Reserve();
  }

  StepPlan Build() {
    for (const Row& row : step_.rows) AddRow(row);
    return std::move(plan_);
  }

 private:
  void Reserve() {
    const std::size_t rows = step_.rows.size();
    plan_.seq_ids.reserve(rows);
    plan_.num_computed.reserve(rows);
    plan_.num_new.reserve(rows);
    plan_.num_blocks.reserve(rows);
    plan_.sampled.reserve(rows);
    plan_.temperature.reserve(rows);
    plan_.top_k.reserve(rows);
    plan_.top_p.reserve(rows);
    plan_.min_p.reserve(rows);
    plan_.seed.reserve(rows);
    plan_.position.reserve(rows);
    plan_.token_ids.reserve(static_cast<std::size_t>(step_.num_tokens));
    std::size_t blocks = 0;
    for (const Row& row : step_.rows) blocks += row.sequence->cache.blocks.size();
    plan_.block_tables.reserve(blocks);
  }

  void AddRow(const Row& row) {
    const Sequence& sequence = *row.sequence;
    const auto& blocks = sequence.cache.blocks;
    if (row.opens) Open(sequence);
    plan_.seq_ids.push_back(sequence.request.id);
    plan_.num_computed.push_back(row.begin);
    plan_.num_new.push_back(row.num_new);
    plan_.num_blocks.push_back(static_cast<std::int32_t>(blocks.size()));
    plan_.block_tables.insert(plan_.block_tables.end(), blocks.begin(), blocks.end());
    plan_.sampled.push_back(static_cast<std::uint8_t>(row.num_sampled));
    AddTokens(row);
    if (row.Samples()) AddSampling(row);
    if (config_.image_token_id) AddImages(row, *config_.image_token_id);
    if (row.num_scores > 0) AddScores(row);
    if (config_.num_state_slots > 0) {
      plan_.state_slots.push_back(sequence.cache.state_slot);
      plan_.state_from.push_back(row.state_from);
    }
    if (config_.tail_tokens > 0) AddTail(row);
    Set(plan_.position_shifts, plan_.seq_ids.size() - 1, sequence.PositionShift(row.begin), 0,
        step_.rows.size());
  }

  void AddTokens(const Row& row) {
    const std::int32_t pending = row.placeholder >= 0 ? 1 : 0;
    row.sequence->AppendTokens(row.begin, row.KnownEnd() - pending, plan_.token_ids);
    if (pending > 0) plan_.token_ids.push_back(-1 - row.placeholder);
    const auto drafts = step_.DraftsOf(row);
    plan_.token_ids.insert(plan_.token_ids.end(), drafts.begin(), drafts.end());
  }

  void AddSampling(const Row& row) {
    const Sequence& sequence = *row.sequence;
    const Sequence::Generation& generation = sequence.generation;
    const Sampling& sampling = generation.sampling;
    const std::size_t index = plan_.seed.size();
    plan_.temperature.push_back(sampling.temperature);
    plan_.top_k.push_back(sampling.top_k);
    plan_.top_p.push_back(sampling.top_p);
    plan_.min_p.push_back(sampling.min_p);
    plan_.seed.push_back(sampling.seed);
    plan_.position.push_back(row.position);
    AddBanned(row);
    if (sequence.draft.golden.mode == GoldenMode::kForce) AddForced(row);
    const std::size_t rows = step_.rows.size();
    Set(plan_.logprobs, index, generation.logprobs, -1, rows);
    Set(plan_.structured, index, std::uint8_t{sequence.structured.wanted}, std::uint8_t{0}, rows);
    if (config_.draft_method == DraftMethod::kMtp) {
      Set(plan_.drafts_wanted, index, drafter_.NumWanted(sequence, sequence.schedule.num_pending),
          0, rows);
    }
    num_positions_ += row.num_sampled;
    Complete(plan_.forced, num_positions_, TokenId{-1});
  }

  // Entry `index` of a column that is left empty as long as nobody has anything but `nothing`.
  template <typename T>
  static void Set(std::vector<T>& column, std::size_t index, T value, T nothing, std::size_t rows) {
    if (column.empty()) {
      if (value == nothing) return;
      column.reserve(rows);
      column.resize(index, nothing);
    }
    column.push_back(value);
  }

  template <typename T>
  static void Complete(std::vector<T>& column, std::int32_t size, T nothing) {
    if (!column.empty()) column.resize(static_cast<std::size_t>(size), nothing);
  }

  // An end is out of the question before the least number of tokens is reached.
  void AddBanned(const Row& row) {
    const Sequence::Generation& generation = row.sequence->generation;
    if (generation.stop_token_ids.empty()) return;
    for (std::int32_t j = 0; j < row.num_sampled; ++j) {
      if (row.position + j >= generation.tokens_min) return;
      plan_.banned.emplace(num_positions_ + j, generation.stop_token_ids);
    }
  }

  void AddForced(const Row& row) {
    const auto& tokens = row.sequence->draft.golden.tokens;
    plan_.forced.resize(static_cast<std::size_t>(num_positions_), -1);
    for (std::int64_t at = row.position; at < row.position + row.num_sampled; ++at) {
      plan_.forced.push_back(tokens.at(static_cast<std::size_t>(at)));
    }
  }

  void AddImages(const Row& row, TokenId image_token_id) {
    const auto& prompt = row.sequence->input.prompt;
    const std::int32_t end = row.begin + row.num_new;
    if (row.begin >= row.sequence->PromptLength()) return;
    const auto embeddings_in = [&](std::int32_t from, std::int32_t until) {
      return static_cast<std::int32_t>(
          std::count(prompt.begin() + from, prompt.begin() + until, image_token_id));
    };
    std::int32_t index = -1;
    for (const Image& image : row.sequence->input.images) {
      ++index;
      //   image:         begin ...........xxxxxxxxxxxx......... end
      //   chunk:                    begin ............ end
      const std::int32_t from = std::max(row.begin, image.begin);
      const std::int32_t until = std::min(end, image.end);
      if (from >= until) continue;
      const std::int32_t count = embeddings_in(from, until);
      if (count == 0) continue;
      plan_.images.push_back(
          {row.sequence->request.id, index, embeddings_in(image.begin, from), count});
    }
  }

  void AddScores(const Row& row) {
    const auto targets = row.sequence->input.prompt.begin() + row.score_begin + 1;
    plan_.prompt_logprobs.push_back({.row = static_cast<std::int32_t>(plan_.seq_ids.size()) - 1,
                                     .start = row.score_begin - row.begin,
                                     .alternatives = row.sequence->input.logprobs,
                                     .targets = {targets, targets + row.num_scores}});
  }

  void Open(const Sequence& sequence) {
    Opened& opened = plan_.opened.emplace_back();
    opened.seq_id = sequence.request.id;
    opened.num_prompt_tokens = sequence.PromptLength();
    sequence.AppendTokens(0, sequence.Length(), opened.token_ids);
    opened.logit_rules = sequence.generation.logit_rules;
  }

  // A pending token can only be in a row, never before it.
  void AddTail(const Row& row) {
    const std::int32_t begin = std::max(row.begin - config_.tail_tokens, 0);
    plan_.tail_ids.insert(plan_.tail_ids.end(),
                          static_cast<std::size_t>(config_.tail_tokens - (row.begin - begin)), -1);
    row.sequence->AppendTokens(begin, row.begin, plan_.tail_ids);
  }

  const Step& step_;
  const EngineConfig& config_;
  const Drafter& drafter_;
  StepPlan plan_;
  std::int32_t num_positions_ = 0;  // so far
};

}  // namespace

StepPlan MakeStepPlan(const Step& step, const EngineConfig& config, const Drafter& drafter,
                      std::vector<SeqId> closed) {
  StepPlan plan = PlanBuilder(step, config, drafter).Build();
  plan.closed = std::move(closed);
  return plan;
}

}  // namespace airside
