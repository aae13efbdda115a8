#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/sequence.h"
#include "engine/types.h"

namespace airside {

// One sequence's part in a step: tokens [begin, begin + num_new). Everything that was so when the
// step was planned, and may be otherwise when it comes back.
//
//   | known tokens, at most one pending | drafts |
//   begin                        num_sampled = 1 + drafts, the last of them; or 0
struct Row {
  Sequence* sequence = nullptr;
  std::uint64_t epoch = 0;  // of the cache; another now: it was preempted in flight
  std::int32_t begin = 0;
  std::int32_t num_new = 0;
  std::int32_t num_sampled = 0;
  std::int32_t first_draft = 0;   // in the step's drafts
  std::int32_t placeholder = -1;  // where the step before samples the pending token; -1: none
  std::int64_t position = 0;      // in the output, of the first token sampled
  std::int32_t score_begin = 0;   // prompt positions [score_begin, + num_scores) give records
  std::int32_t num_scores = 0;
  BlockId state_from{-1};  // after which block the state is taken up; -1: as the slot has it
  bool opens = false;      // the plan tells the workers of its logit rules

  bool Samples() const { return num_sampled > 0; }
  std::int32_t NumDrafts() const { return num_sampled > 0 ? num_sampled - 1 : 0; }
  // The end of the tokens that are surely the sequence's.
  std::int32_t KnownEnd() const { return begin + num_new - NumDrafts(); }
};

// An image, by its sequence and its place there.
struct ImageId {
  SeqId seq_id;
  std::int32_t image_index;
};

struct Step {
  StepId id{};
  std::vector<Row> rows;
  std::vector<ImageId> ahead;      // to be encoded for rows of later steps
  std::vector<TokenId> drafts;     // of all rows, in order
  std::int32_t num_tokens = 0;     // over all rows
  std::int32_t num_positions = 0;  // that are sampled, over all rows
  bool awaited = false;            // no step is planned before it is back, for the sake of drafts

  std::span<const TokenId> DraftsOf(const Row& row) const {
    return std::span(drafts).subspan(row.first_draft, row.NumDrafts());
  }
};

}  // namespace airside
