#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "engine/config.h"
#include "engine/step.h"
#include "engine/types.h"

namespace airside {

// Of sampled tokens, those that are none.
inline constexpr TokenId kNoProbability = -1;
inline constexpr TokenId kNothingAllowed = -2;  // by the grammar

// Size of a log-probability record with so many alternatives: four floats, and a token and a float
// for each.
constexpr std::size_t RecordBytes(std::int32_t alternatives) {
  return 16 + 8 * static_cast<std::size_t>(alternatives);
}

// What the workers answer to a plan; columns as in the bus message of the same name.
struct StepResult {
  std::span<const TokenId> sampled = {};            // one per sampled position
  std::span<const std::byte> logprobs = {};         // records of rows that want them
  std::span<const std::byte> prompt_logprobs = {};  // records of prompt positions asked for
  // From a draft head; empty, or an entry per row that samples.
  std::span<const std::int32_t> num_drafts = {};
  std::span<const TokenId> draft_tokens = {};  // [sum(num_drafts)]
  std::span<const float> draft_confidences = {};
};

// What about the result does not fit the step, or could not be computed further, if anything.
std::optional<std::string> FindMismatch(const StepResult& result, const Step& step,
                                        const EngineConfig& config);

// One row's part of a result.
struct RowResult {
  std::span<const TokenId> sampled;
  std::span<const std::byte> records;
  std::span<const std::byte> scores;
  std::span<const TokenId> proposed;
  std::span<const float> confidences;
};

// Takes a result that fits apart, row by row.
class ResultReader {
 public:
  explicit ResultReader(const StepResult& result) : left_(result) {}

  // The part of the step's next row.
  RowResult Next(const Row& row);

 private:
  StepResult left_;
};

}  // namespace airside
