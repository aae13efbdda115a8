#include "engine/draft_length.h"

namespace airside {

int DraftLength(std::span<const float> confidences, const StepLoad& load) {
  const double rows = load.num_rows;
  double tokens = load.num_tokens;
  double chance = 1;
  int length = 0;
  for (const float confidence : confidences) {
    chance *= confidence;
    // Written so that a confidence that is no number ends it.
    if (!(chance * (load.tokens_balance + tokens) >= rows)) break;
    tokens += 1;
    ++length;
  }
  return length;
}

}  // namespace airside
