#include "engine/step_result.h"

#include <algorithm>
#include <numeric>

namespace airside {
namespace {

std::size_t RecordsOf(const Row& row) {
  const std::int32_t alternatives = row.sequence->generation.logprobs;
  return alternatives < 0 ? 0 : RecordBytes(alternatives) * row.num_sampled;
}

std::size_t ScoresOf(const Row& row) {
  return row.num_scores == 0 ? 0 : RecordBytes(row.sequence->input.logprobs) * row.num_scores;
}

std::optional<std::string> Differ(const char* column, std::size_t got, std::size_t wanted,
                                  const char* unit) {
  if (got == wanted) return std::nullopt;
  return std::string(column) + ": " + std::to_string(got) + " " + unit +
         " came, but the step has " + std::to_string(wanted);
}

// A token that the model does not know would fail the next step, and with it every group of workers
// that is given it again; the image token, which workers never sample, would be taken for a
// picture.
std::optional<std::string> FindImpossible(std::span<const TokenId> sampled,
                                          const EngineConfig& config) {
  const auto at = std::find_if(sampled.begin(), sampled.end(), [&](TokenId token) {
    return config.StandsForImage(token) || (config.vocab_size && token >= *config.vocab_size);
  });
  if (at == sampled.end()) return std::nullopt;
  return "sampled[" + std::to_string(at - sampled.begin()) + "] is " + std::to_string(*at) +
         ", which no model makes";
}

// Takes the first `count` away from a column.
template <typename T>
std::span<const T> TakeFirst(std::span<const T>& column, std::size_t count) {
  const std::span<const T> first = column.first(count);
  column = column.subspan(count);
  return first;
}

}  // namespace

std::optional<std::string> FindMismatch(const StepResult& result, const Step& step,
                                        const EngineConfig& config) {
  std::size_t num_sampling = 0;
  std::size_t num_records = 0;
  std::size_t num_scores = 0;
  for (const Row& row : step.rows) {
    num_sampling += row.Samples() ? 1 : 0;
    num_records += RecordsOf(row);
    num_scores += ScoresOf(row);
  }
  const auto num_positions = static_cast<std::size_t>(step.num_positions);
  if (auto fault = Differ("sampled", result.sampled.size(), num_positions, "tokens")) return fault;
  if (auto fault = FindImpossible(result.sampled, config)) return fault;
  if (auto fault = Differ("logprobs", result.logprobs.size(), num_records, "bytes")) return fault;
  if (auto fault = Differ("prompt_logprobs", result.prompt_logprobs.size(), num_scores, "bytes")) {
    return fault;
  }
  const auto& num_drafts = result.num_drafts;
  if (!num_drafts.empty()) {
    if (auto fault = Differ("num_drafts", num_drafts.size(), num_sampling, "entries")) return fault;
  }
  if (std::any_of(num_drafts.begin(), num_drafts.end(), [](auto count) { return count < 0; })) {
    return "num_drafts: less than none";
  }
  const auto total = static_cast<std::size_t>(
      std::accumulate(num_drafts.begin(), num_drafts.end(), std::int64_t{0}));
  if (auto fault = Differ("draft_tokens", result.draft_tokens.size(), total, "tokens")) {
    return fault;
  }
  return Differ("draft_confidences", result.draft_confidences.size(), total, "entries");
}

RowResult ResultReader::Next(const Row& row) {
  RowResult part;
  part.sampled = TakeFirst(left_.sampled, static_cast<std::size_t>(row.num_sampled));
  part.records = TakeFirst(left_.logprobs, RecordsOf(row));
  part.scores = TakeFirst(left_.prompt_logprobs, ScoresOf(row));
  if (row.Samples() && !left_.num_drafts.empty()) {
    const auto count = static_cast<std::size_t>(TakeFirst(left_.num_drafts, 1).front());
    part.proposed = TakeFirst(left_.draft_tokens, count);
    part.confidences = TakeFirst(left_.draft_confidences, count);
  }
  return part;
}

}  // namespace airside
