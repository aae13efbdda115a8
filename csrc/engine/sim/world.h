#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "engine/sim/fake_worker.h"

namespace airside::sim {

// What happened, over all runs.
struct Tally {
  std::int64_t events = 0;
  std::int64_t requests = 0;
  std::int64_t rejections = 0;
  std::int64_t aborts = 0;
  std::int64_t worker_failures = 0;
  std::int64_t steps = 0;
  std::int64_t chunks = 0;  // rows that did not reach the end of their sequence
  std::int64_t tokens = 0;
  std::int64_t preemptions = 0;
  std::int64_t recomputed_tokens = 0;
  std::map<Status, std::int64_t> finished;
};

// Everything around one engine, drawn from one seed: clients, pictures, workers, time. Whatever the
// engine does is compared with what its clients and the fake model know.
class World {
 public:
  World(std::uint64_t seed, Tally& tally);

  // One random event, and a look at everything; throws on what must not happen.
  void Step();

  // Pictures arrive, workers stay up; every request must end within a bounded number of steps.
  void Drain();

 private:
  struct Picture {
    std::vector<TokenId> expansion;
    bool shape_known = false;
    bool ready = false;
  };
  struct Trip {  // a live request as its client sees it
    Request request;
    std::vector<Picture> pictures;
    std::vector<TokenId> made;
    std::optional<Digest> digest;  // of prompt and made, once the first token is made
    std::set<std::string> ends;    // reasons that would not surprise the client
  };

  int Draw(int low, int high);  // both included
  bool Chance(int percent) { return Draw(1, 100) <= percent; }
  EngineConfig DrawConfig();
  Request DrawRequest();
  SeqId DrawLive();

  void Add();
  void Shape(SeqId seq_id);
  void Ready(SeqId seq_id);
  void Abort();
  void FailVision();
  void Schedule();
  void Apply();
  void FailStep();

  void Look();
  void TakeToken(SeqId seq_id, TokenId token);
  void TakeFinish(const Finish& finish);
  Digest DigestPrompt(const Trip& trip) const;
  std::int64_t PromptTokens(const Trip& trip) const;

  std::mt19937_64 random_;
  const EngineConfig config_;
  Tally& tally_;
  Engine engine_;
  FakeWorker worker_;
  Seconds now_ = 1000;
  std::uint64_t num_requests_ = 0;
  std::map<SeqId, Trip> live_;
  std::optional<StepPlan> plan_;
};

}  // namespace airside::sim
