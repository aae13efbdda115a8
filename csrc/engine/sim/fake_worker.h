#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "engine/config.h"
#include "engine/sim/fake_model.h"
#include "engine/sim/plan_rows.h"
#include "engine/step_plan.h"
#include "engine/step_result.h"
#include "engine/types.h"

namespace airside::sim {

// What the workers know of a request without its plans.
struct Passenger {
  std::string salt;
  std::vector<std::uint64_t> pictures;  // the content of each
  bool has_rules = false;
};

// What a step brings back.
struct FakeResult {
  std::vector<TokenId> sampled;
  std::vector<std::uint32_t> logprobs;
  std::vector<std::uint32_t> prompt_logprobs;
  std::vector<std::int32_t> num_drafts;
  std::vector<TokenId> draft_tokens;
  std::vector<float> draft_confidences;

  // For the engine, as long as this lives.
  StepResult View() const;
};

// Computes plans with the fake model, in the order in which they come, and keeps between them what
// a worker does: the KV pool, states, the tokens of the step before, histories and grammars. Throws
// std::logic_error on whatever a plan must not ask.
class FakeWorker {
 public:
  FakeWorker(const EngineConfig& config, std::uint64_t seed);

  void Introduce(SeqId seq_id, Passenger passenger) { passengers_[seq_id] = std::move(passenger); }

  // A new process: whatever it held is gone.
  void Restart();

  void OpenGrammar(SeqId seq_id, std::vector<TokenId> output);

  FakeResult Execute(const StepPlan& plan);

 private:
  struct Cell {  // of the KV pool
    Prefix before;
    Prefix after;
  };
  struct State {  // after the token at `position`
    std::int32_t position = -1;
    Digest digest = 0;
  };
  struct History {
    std::int32_t num_prompt_tokens = 0;
    Digest rules = 0;
    std::vector<TokenId> tokens;
  };
  struct Grammar {
    std::vector<TokenId> tokens;
  };
  // A row while it is computed.
  struct Work {
    const StepPlan& plan;
    const PlanRow& row;
    std::vector<TokenId> tokens = {};   // placeholders replaced
    std::vector<Prefix> prefixes = {};  // after each token
    std::vector<Digest> states = {};    // likewise
    bool is_in_vain = false;            // its sequence has ended
  };

  // Image and place of the next embedding of the plan, which must be this sequence's.
  using NextPicture = std::function<std::pair<std::int32_t, std::int32_t>(SeqId)>;

  void Open(const StepPlan& plan);
  void ResolveTokens(Work& work) const;
  void ComputeKv(Work& work, const NextPicture& next_picture);
  Prefix ReadKv(const PlanRow& row);
  void ComputeStates(Work& work, Digest digest);
  Digest ReadState(const PlanRow& row) const;
  void Remember(const Work& work);
  void SampleRow(const Work& work, FakeResult& result);
  TokenId SamplePosition(const Work& work, std::int32_t drafts, FakeResult& result) const;
  Digest WeighHistory(const Work& work, std::int64_t num_made, std::int32_t drafts) const;
  void Accept(const Work& work, std::vector<TokenId> accepted);
  void Propose(const Work& work, const std::vector<TokenId>& accepted, FakeResult& result);
  void ScorePrompt(const Work& work, std::size_t index, FakeResult& result) const;

  Cell& At(const PlanRow& row, std::int32_t position);

  const EngineConfig config_;
  std::mt19937_64 random_;  // for draft tokens, which may be anything
  std::map<SeqId, Passenger> passengers_;
  std::vector<Cell> pool_;
  std::int32_t ring_ = 1;          // positions that a slot remembers
  std::vector<State> slots_;       // [num_state_slots, ring]
  std::vector<State> block_ends_;  // [num_blocks]
  std::map<SeqId, History> opened_;
  std::map<SeqId, Grammar> grammars_;
  StepId last_step_{};
  std::vector<TokenId> last_sampled_;
};

// A digest of a grammar that has taken these tokens.
Digest DigestGrammar(const std::vector<TokenId>& tokens, std::span<const TokenId> drafts);

}  // namespace airside::sim
