#include "engine/sim/plan_check.h"

#include <algorithm>
#include <cstddef>
#include <set>

#include "engine/ensure.h"

namespace airside::sim {

PlanCheck::PlanCheck(const EngineConfig& config, const std::map<SeqId, Trip>& live,
                     const StepPlan& plan, const StepPlan* before)
    : config_(config), live_(live), plan_(plan), before_(before), rows_(ReadRows(plan)) {}

void PlanCheck::Run() const {
  CheckStep();
  CheckMixture();
  CheckImages();
  for (const PlanRow& row : rows_) CheckRow(row);
}

void PlanCheck::CheckStep() const {
  Ensure(static_cast<int>(rows_.size()) <= config_.max_num_seqs, "more rows than may be");
  Ensure(static_cast<int>(plan_.token_ids.size()) <= config_.max_num_batched_tokens,
         "more tokens than may be");
  std::set<SeqId> seq_ids;
  std::set<std::int32_t> slots;
  std::set<BlockId> written;
  for (const PlanRow& row : rows_) {
    Ensure(seq_ids.insert(row.seq_id).second, "a sequence with two rows");
    Ensure((row.state_slot >= 0) == (config_.num_state_slots > 0),
           "a state slot, or none, too many");
    Ensure(row.state_slot < 0 || slots.insert(row.state_slot).second, "a state slot of two");
    for (std::int32_t block = row.begin / config_.block_size;
         block < static_cast<std::int32_t>(row.blocks.size()); ++block) {
      Ensure(written.insert(row.blocks[block]).second, "a block that two rows write to");
    }
  }
  for (const PlanRow& row : rows_) {
    for (std::int32_t block = 0; block < row.begin / config_.block_size; ++block) {
      // Within a step every layer writes before it reads, but then the content must be the same.
      Ensure(config_.enable_prefix_caching || !written.contains(row.blocks[block]),
             "a block that is read and written");
    }
  }
}

// Who decodes waits for few tokens of prompts.
void PlanCheck::CheckMixture() const {
  if (!config_.LimitsMixedSteps()) return;
  std::int32_t of_decodes = 0;
  std::int32_t of_prompts = 0;
  for (const PlanRow& row : rows_) {
    const auto num_tokens = static_cast<std::int32_t>(row.tokens.size());
    const std::int32_t num_known = num_tokens - row.num_drafts();
    if (num_known > 1) {
      of_prompts += num_known;
    } else if (NumPending(row) > 0) {
      of_decodes += num_tokens;
    }
  }
  const std::int32_t most =
      std::max(config_.max_num_mixed_tokens - of_decodes, (config_.max_num_mixed_tokens + 1) / 2);
  Ensure(of_decodes == 0 || of_prompts <= most, "too much of prompts beside decodes");
}

// Who decodes waits neither for one picture after another to be encoded, nor for one to be encoded
// and read.
void PlanCheck::CheckImages() const {
  // What goes on from a token that the step before samples was not admitted just now.
  const bool has_decode = std::any_of(rows_.begin(), rows_.end(),
                                      [&](const PlanRow& row) { return NumPending(row) > 0; });
  const auto most = static_cast<std::size_t>(std::max(config_.max_num_seqs / 16, 1));
  std::set<std::uint64_t> contents;
  for (const ImageId& image : plan_.ahead) {
    const Picture& picture = live_.at(image.seq_id).pictures().at(image.image_index);
    Ensure(picture.ready && !picture.encoded, "a picture that cannot be encoded, or is");
    Ensure(std::none_of(plan_.images.begin(), plan_.images.end(),
                        [&](const ImageSlice& slice) {
                          return slice.seq_id == image.seq_id &&
                                 slice.image_index == image.image_index;
                        }),
           "a picture that is encoded ahead, and read");
    contents.insert(picture.content);
  }
  Ensure(contents.size() <= most, "too many pictures in one step");
  if (!has_decode || !config_.MayEncodeAhead()) return;
  for (const ImageSlice& slice : plan_.images) {
    Ensure(live_.at(slice.seq_id).pictures().at(slice.image_index).encoded,
           "a picture that is encoded and read beside decodes");
  }
}

void PlanCheck::CheckRow(const PlanRow& row) const {
  const auto at = live_.find(row.seq_id);
  Ensure(at != live_.end(), "a row of nobody");
  const Trip& trip = at->second;
  Ensure(trip.ShapesKnown(), "a row before all shapes are known");
  Ensure(!row.tokens.empty(), "a row without tokens");
  const auto num_blocks = static_cast<std::int32_t>(row.blocks.size());
  Ensure(num_blocks == (row.end() + config_.block_size - 1) / config_.block_size,
         "another number of blocks than its tokens need");
  Ensure(row.position_shift == trip.PositionShift(row.begin), "positions go on from elsewhere");
  Ensure(!trip.SplitsPicture(row.end() - row.num_drafts()), "a picture in two steps");
  CheckTokens(row, trip);
  CheckTail(row, trip);
  if (row.num_sampled > 0) CheckSampling(row, trip);
}

// 1 where the row goes on from a token that the step before is about to sample.
std::int32_t PlanCheck::NumPending(const PlanRow& row) const {
  return std::any_of(row.tokens.begin(), row.tokens.end(), [](TokenId token) { return token < 0; })
             ? 1
             : 0;
}

void PlanCheck::CheckTokens(const PlanRow& row, const Trip& trip) const {
  const std::vector<TokenId>& known = trip.tokens();
  const std::int32_t first_draft = row.end() - row.num_drafts();
  const auto num_known = static_cast<std::int32_t>(known.size());
  for (std::int32_t i = row.begin; i < row.end(); ++i) {
    const TokenId token = row.tokens[i - row.begin];
    if (i >= first_draft) {
      Ensure(token >= 0 && token != config_.image_token_id, "a draft that is no token");
    } else if (i < num_known) {
      Ensure(token == known[i], "another token than the sequence has there");
    } else {
      Ensure(i == num_known, "a token beyond the pending one");
      CheckPlaceholder(row, token);
    }
  }
  const std::int32_t length = num_known + NumPending(row);
  Ensure((row.num_sampled > 0) == (first_draft == length), "sampled, or not, before its end");
}

void PlanCheck::CheckPlaceholder(const PlanRow& row, TokenId token) const {
  Ensure(token < 0 && before_ != nullptr, "a token that nobody knows");
  Ensure(
      static_cast<std::uint64_t>(before_->step_id) + 1 == static_cast<std::uint64_t>(plan_.step_id),
      "a placeholder for a step that is not the one before");
  for (const PlanRow& earlier : ReadRows(*before_)) {
    if (earlier.seq_id != row.seq_id) continue;
    Ensure(earlier.num_sampled == 1 && earlier.first_position == -1 - token,
           "a placeholder for somebody else's token");
    return;
  }
  Ensure(false, "a placeholder for a token that is not being sampled");
}

void PlanCheck::CheckSampling(const PlanRow& row, const Trip& trip) const {
  const auto index = static_cast<std::size_t>(row.sampling_index);
  const Request& request = trip.request();
  Ensure(plan_.position[index] == trip.num_made() + NumPending(row), "sampled for another place");
  Ensure(plan_.seed[index] == request.sampling.seed, "sampled with another seed");
  Ensure(!request.structured || trip.grammar_ready, "sampled before its grammar is built");
  Ensure(request.structured == (!plan_.structured.empty() && plan_.structured[index] == 1),
         "a grammar too many, or too few");
  const std::int32_t logprobs = plan_.logprobs.empty() ? -1 : plan_.logprobs[index];
  Ensure(logprobs == request.logprobs, "other records than were asked for");
  const std::int32_t wanted = plan_.drafts_wanted.empty() ? 0 : plan_.drafts_wanted[index];
  const std::int32_t drafts_max =
      std::min(request.drafts_max.value_or(config_.max_draft_tokens), config_.max_draft_tokens);
  Ensure(0 <= wanted && wanted <= drafts_max, "more drafts wanted than may be");
  Ensure(request.golden.mode == GoldenMode::kForce || row.num_drafts() <= drafts_max,
         "more drafts than may be");
}

void PlanCheck::CheckTail(const PlanRow& row, const Trip& trip) const {
  const auto tail = static_cast<std::int32_t>(row.tail.size());
  Ensure(tail == config_.tail_tokens, "a tail of another length");
  for (std::int32_t i = 0; i < tail; ++i) {
    const std::int32_t position = row.begin - tail + i;
    const TokenId expected = position < 0 ? -1 : trip.tokens().at(position);
    Ensure(row.tail[i] == expected, "another token before the row than there is");
  }
}

}  // namespace airside::sim
