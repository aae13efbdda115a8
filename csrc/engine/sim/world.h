#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <vector>

#include "engine/engine.h"
#include "engine/sim/dice.h"
#include "engine/sim/draws.h"
#include "engine/sim/fake_worker.h"
#include "engine/sim/plan_rows.h"
#include "engine/sim/tally.h"
#include "engine/sim/trip.h"

namespace airside::sim {

// Everything around one engine, drawn from one seed: clients, pictures, workers, time. Whatever the
// engine does is compared with what its clients and the fake model know.
class World {
 public:
  World(std::uint64_t seed, Tally& tally);

  // One random event, and a look at what came of it; throws on what must not happen.
  void Step();

  // Pictures arrive, grammars are built, workers stay up; every request must end within a bounded
  // number of steps.
  void Drain();

 private:
  struct Flight {
    StepPlan plan;
    std::optional<FakeResult> result;  // once it was computed
  };

  SeqId DrawLive();
  void Add();
  int DrawPicture(const std::vector<Picture>& pictures, bool Picture::* is_known);
  void Shape(SeqId seq_id);
  void Ready(SeqId seq_id);
  void BuildGrammar(SeqId seq_id);
  void Disturb();
  void Settle();
  std::int64_t StepsMax() const;
  void End();
  void StopByClient(SeqId seq_id);
  void Schedule();
  void Execute();
  void Apply();
  void FailStep();
  void Advance();  // the first of the three above that can be done, or schedule

  void TakePlan(const StepPlan& plan);
  void CountOvertaken();

  void Look();
  void TakeOutput(const ClientOutput& output);
  void TakeFinish(const ClientOutput& output, const Finish& finish);
  void CheckAtRest();

  Dice dice_;
  const EngineConfig config_;
  Tally& tally_;
  RequestDraw requests_;
  Engine engine_;
  FakeWorker worker_;
  Seconds now_ = 1000;
  std::uint64_t num_requests_ = 0;
  std::int64_t num_looks_ = 0;
  std::map<SeqId, Trip> live_;
  std::deque<Flight> flights_;  // in flight, in order
};

}  // namespace airside::sim
