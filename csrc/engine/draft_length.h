#pragma once

#include <cstdint>
#include <span>

namespace airside {

// What a step holds already when drafts are about to be added to a row of it.
struct StepLoad {
  std::int32_t num_rows = 1;    // rows that sample: at least so many tokens come of the step
  std::int32_t num_tokens = 1;  // tokens to compute
  // So many tokens take as long to compute as it takes to read the weights once, which each step
  // does: below it another token is cheap, above it is paid for in full.
  std::int32_t tokens_balance = 64;
};

// How many of a row's proposed draft tokens to verify, given how likely each is right if those
// before it are.
//
// A step of T tokens takes time in proportion to B + T, B being `tokens_balance`; it makes about R
// tokens, one per row. One more token in it makes it longer by the part 1 / (B + T), which costs
// R / (B + T) of the tokens made in that time. It brings a token with the probability that it and
// all drafts before it are right. So drafts are taken while that product is worth the cost:
//
//   R    T    B    a draft is verified down to a product of
//   1    1    64   0.02    alone: nearly always
//   16   16   64   0.2
//   64   64   64   0.5
//   256  256  64   0.8     a full step: only what is all but certain
//   4    500  64   0.01    beside a long prompt's chunk: it hardly shows
int DraftLength(std::span<const float> confidences, const StepLoad& load);

}  // namespace airside
