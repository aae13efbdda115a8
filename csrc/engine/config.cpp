#include "engine/config.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <stdexcept>
#include <string>
#include <utility>

namespace airside {
namespace {

// A table of names; throws what Parse... promises when `name` is none of them.
template <typename Enum, std::size_t kCount>
Enum Parse(const char* field, std::string_view name,
           const std::array<std::pair<std::string_view, Enum>, kCount>& table) {
  std::string choices;
  for (const auto& [known, value] : table) {
    if (known == name) return value;
    choices += (choices.empty() ? "\"" : ", \"") + std::string(known) + "\"";
  }
  throw std::invalid_argument(std::string(field) + " is \"" + std::string(name) +
                              "\", but must be one of " + choices);
}

template <typename Enum, std::size_t kCount>
std::string_view NameIn(const std::array<std::pair<std::string_view, Enum>, kCount>& table,
                        Enum value) {
  for (const auto& [name, known] : table) {
    if (known == value) return name;
  }
  throw std::logic_error("a value without a name");
}

constexpr std::array kPolicies = {
    std::pair<std::string_view, PreemptionPolicy>{"recompute", PreemptionPolicy::kRecompute},
    std::pair<std::string_view, PreemptionPolicy>{"stop", PreemptionPolicy::kStop},
};
constexpr std::array kRules = {
    std::pair<std::string_view, VictimRule>{"least_waste", VictimRule::kLeastWaste},
    std::pair<std::string_view, VictimRule>{"most_output", VictimRule::kMostOutput},
    std::pair<std::string_view, VictimRule>{"last", VictimRule::kLast},
};
constexpr std::array kMethods = {
    std::pair<std::string_view, DraftMethod>{"none", DraftMethod::kNone},
    std::pair<std::string_view, DraftMethod>{"ngram", DraftMethod::kNgram},
    std::pair<std::string_view, DraftMethod>{"mtp", DraftMethod::kMtp},
};

void AtLeast(std::int64_t least, std::int64_t value, const char* name) {
  if (value < least) {
    throw std::invalid_argument(std::string(name) + " is " + std::to_string(value) +
                                ", but must be at least " + std::to_string(least));
  }
}

void InVocabulary(std::optional<TokenId> token, const EngineConfig& config, const char* name) {
  if (!token) return;
  AtLeast(0, *token, name);
  if (config.vocab_size && *token >= *config.vocab_size) {
    throw std::invalid_argument(std::string(name) + " is " + std::to_string(*token) +
                                ", but must be below vocab_size " +
                                std::to_string(*config.vocab_size));
  }
}

}  // namespace

std::int64_t EngineConfig::SequenceTokensMax() const {
  return std::min<std::int64_t>(max_model_len, PoolTokens());
}

void Validate(const EngineConfig& config) {
  AtLeast(1, config.num_blocks, "num_blocks");
  AtLeast(1, config.block_size, "block_size");
  AtLeast(1, config.max_num_seqs, "max_num_seqs");
  AtLeast(1, config.max_num_batched_tokens, "max_num_batched_tokens");
  AtLeast(0, config.max_num_mixed_tokens, "max_num_mixed_tokens");
  AtLeast(2, config.max_model_len, "max_model_len");
  AtLeast(1, config.max_queued_requests, "max_queued_requests");
  AtLeast(1, config.max_queued_tokens, "max_queued_tokens");
  AtLeast(0, config.max_draft_tokens, "max_draft_tokens");
  if (config.draft_method != DraftMethod::kNone) {
    AtLeast(1, config.max_draft_tokens, "max_draft_tokens");
  }
  AtLeast(0, config.num_state_slots, "num_state_slots");
  AtLeast(0, config.tail_tokens, "tail_tokens");
  if (config.vocab_size) AtLeast(1, *config.vocab_size, "vocab_size");
  InVocabulary(config.image_token_id, config, "image_token_id");
  InVocabulary(config.image_mark_id, config, "image_mark_id");
  if (config.image_mark_id && !config.image_token_id) {
    throw std::invalid_argument("there is an image_mark_id, but no image_token_id");
  }
}

PreemptionPolicy ParsePreemptionPolicy(std::string_view name) {
  return Parse("preemption", name, kPolicies);
}

VictimRule ParseVictimRule(std::string_view name) { return Parse("victim_rule", name, kRules); }

DraftMethod ParseDraftMethod(std::string_view name) {
  return Parse("draft_method", name, kMethods);
}

std::string_view Name(PreemptionPolicy policy) { return NameIn(kPolicies, policy); }
std::string_view Name(VictimRule rule) { return NameIn(kRules, rule); }
std::string_view Name(DraftMethod method) { return NameIn(kMethods, method); }

}  // namespace airside
