#include "engine/sim/victim_comparison.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iomanip>
#include <ostream>
#include <vector>

#include "engine/engine.h"
#include "engine/ensure.h"
#include "engine/sim/dice.h"

namespace airside::sim {
namespace {

constexpr int kLoads = 8;
constexpr int kRequests = 600;   // of each load
constexpr int kConcurrent = 48;  // requests at a time
constexpr int kBlockTokens = 16;

struct Trial {
  VictimRule rule;
  bool caches;
};

// Between low and high, small ones more often: what a mix of chats and documents looks like.
int DrawLength(Dice& dice, int low, int high) {
  const double u = dice.Draw(0, 1000) / 1000.0;
  return static_cast<int>(low * std::pow(static_cast<double>(high) / low, u));
}

std::vector<Request> DrawLoad(int seed) {
  Dice dice(static_cast<std::uint64_t>(seed));
  std::vector<Request> load(kRequests);
  for (std::size_t i = 0; i < load.size(); ++i) {
    Request& request = load[i];
    request.seq_id = SeqId{i};
    request.token_ids.resize(DrawLength(dice, 32, 1500));
    for (TokenId& token : request.token_ids) token = dice.Draw(0, 30'000);
    request.max_tokens = DrawLength(dice, 16, 800);
    request.arrival = static_cast<Seconds>(i);
  }
  return load;
}

EngineConfig ConfigOf(const Trial& trial, const std::vector<Request>& load) {
  std::int64_t tokens = 0;
  for (const Request& request : load) {
    tokens += static_cast<std::int64_t>(request.token_ids.size()) + *request.max_tokens;
  }
  const std::int64_t tokens_at_a_time = tokens / kRequests * kConcurrent / 3;
  EngineConfig config;
  config.block_size = kBlockTokens;
  config.num_blocks = static_cast<int>(tokens_at_a_time / kBlockTokens);
  config.max_num_seqs = kConcurrent;
  config.max_num_batched_tokens = 512;
  config.max_model_len = 4096;
  config.max_queued_tokens = 1'000'000;
  config.victim_rule = trial.rule;
  config.enable_prefix_caching = trial.caches;
  return config;
}

// Any token will do: nobody stops before its length.
std::vector<TokenId> Answer(const StepPlan& plan, Dice& dice) {
  std::vector<TokenId> sampled;
  for (const std::uint8_t count : plan.sampled) {
    for (int i = 0; i < count; ++i) sampled.push_back(dice.Draw(0, 30'000));
  }
  return sampled;
}

Stats Run(const Trial& trial, const std::vector<Request>& load) {
  Dice dice(11);
  Engine engine(ConfigOf(trial, load));
  std::size_t num_added = 0;
  std::size_t num_ended = 0;
  Seconds now = 0;
  while (num_ended < load.size()) {
    for (; num_added < load.size() && num_added < num_ended + kConcurrent; ++num_added) {
      Ensure(!engine.Add(load[num_added], now), "a request of the load was refused");
    }
    // Two steps in flight all the time, as under load.
    std::vector<StepPlan> plans;
    while (auto plan = engine.Schedule(now)) plans.push_back(std::move(*plan));
    Ensure(!plans.empty(), "the load does not move");
    for (const StepPlan& plan : plans) {
      const std::vector<TokenId> sampled = Answer(plan, dice);
      engine.Apply(plan.step_id, {.sampled = sampled}, ++now);
    }
    for (const ClientOutput& output : engine.TakeOutputs()) num_ended += output.finished.size();
  }
  return engine.GetStats();
}

void PrintTrial(const Trial& trial, std::ostream& out) {
  Stats total;
  for (int seed = 1; seed <= kLoads; ++seed) {
    const Stats stats = Run(trial, DrawLoad(seed));
    total.num_preemptions += stats.num_preemptions;
    total.recomputed_tokens += stats.recomputed_tokens;
    total.generation_tokens += stats.generation_tokens;
    total.steps += stats.steps;
  }
  out << std::left << std::setw(14) << Name(trial.rule) << std::setw(7)
      << (trial.caches ? "on" : "off") << std::right << std::setw(11) << total.num_preemptions
      << std::setw(19) << total.recomputed_tokens << std::setw(16) << std::fixed
      << std::setprecision(3)
      << static_cast<double>(total.recomputed_tokens) / static_cast<double>(total.generation_tokens)
      << std::setw(9) << total.steps << "\n";
}

}  // namespace

void CompareVictims(std::ostream& out) {
  out << kLoads << " loads of " << kRequests << " requests, " << kConcurrent
      << " at a time, in a pool for a third of them\n"
      << "victim rule   cache  preemptions  recomputed tokens  per token made    steps\n";
  for (const bool caches : {true, false}) {
    for (const VictimRule rule :
         {VictimRule::kLeastWaste, VictimRule::kMostOutput, VictimRule::kLast}) {
      PrintTrial({rule, caches}, out);
    }
  }
}

}  // namespace airside::sim
