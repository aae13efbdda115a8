#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/config.h"
#include "engine/outbox.h"
#include "engine/request.h"
#include "engine/scheduler.h"
#include "engine/sequence.h"
#include "engine/status.h"
#include "engine/step_plan.h"
#include "engine/types.h"

namespace airside {

struct Stats {
  std::int64_t num_waiting = 0;
  std::int64_t num_running = 0;
  std::int64_t blocks_total = 0;
  std::int64_t blocks_live = 0;
  std::int64_t blocks_free = 0;
  std::int64_t num_preemptions = 0;
  std::int64_t recomputed_tokens = 0;       // computed again after a preemption or a lost step
  std::int64_t steps = 0;                   // that came back
  std::int64_t prompt_tokens = 0;           // computed for the first time
  std::int64_t generation_tokens = 0;       // told to clients
  std::map<Status, std::int64_t> finished;  // every final status
};

// The state machine: every live sequence, and the one step that may be in flight. Pure: no clock,
// thread, file, socket or random source; all times come in as arguments.
class Engine {
 public:
  explicit Engine(const EngineConfig& config);
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Takes a request in, or says why not.
  std::optional<Rejection> Add(Request request, Seconds now);

  // The tokens that take the place of an image's mark, and then the news that its pixels are in.
  // Both false, with nothing changed, when the sequence is not live or this is known already.
  // std::invalid_argument: there is no such image, no token, or no shape yet.
  bool SetShape(SeqId seq_id, int image_index, std::vector<TokenId> expansion);
  bool SetReady(SeqId seq_id, int image_index);

  // End a sequence now; false when it is not live.
  bool Abort(SeqId seq_id, std::string cause);
  bool FailVision(SeqId seq_id, std::string detail);

  // Ends what is past its deadline; then the next step, if none is in flight and anything can move.
  std::optional<StepPlan> Schedule(Seconds now);

  // Closes the step in flight with one token per sampled row; a negative one is none, and ends its
  // sequence. std::invalid_argument, with nothing changed: another step, or another number of
  // tokens.
  void Apply(StepId step_id, std::span<const TokenId> sampled, Seconds now);

  // The step in flight, if any, and all KV are lost. Also ends what is past its deadline, so that
  // it can be called while there is nobody to compute for.
  void FailStep(Seconds now);

  std::vector<ClientOutput> TakeOutputs() { return outbox_.Take(); }

  Stats GetStats() const;
  std::optional<Status> StatusOf(SeqId seq_id) const;
  int QueuePosition(SeqId seq_id) const;
  bool HasWork() const { return !in_flight_ && scheduler_.HasWork(); }

  // Throws std::logic_error that names the first broken invariant. Looks at everything.
  void Check() const;

 private:
  struct InFlight {
    StepId id;
    std::vector<Row> rows;
    // Ended while the step computes them: workers still write to their blocks.
    std::vector<std::unique_ptr<Sequence>> leaving;
  };
  struct ByDeadline {
    bool operator()(const Sequence* a, const Sequence* b) const;
  };

  std::optional<Rejection> FindQueueFull(const Request& request) const;
  Sequence* Find(SeqId seq_id) const;
  Sequence* FindImage(SeqId seq_id, int image_index) const;

  void AdvanceClock(Seconds now);
  void EndOverdue();
  void CountComputed(const Row& row);
  void TakeToken(Sequence& sequence, TokenId token);
  bool EndIfComplete(Sequence& sequence);
  std::string DescribeLimit(const Sequence& sequence) const;

  void End(Sequence& sequence, Status final_status, std::string detail);
  void Dismiss(Sequence& sequence, std::string detail);
  Finish MakeFinish(const Sequence& sequence, std::string detail) const;
  InFlight CloseStep();

  const EngineConfig config_;
  Scheduler scheduler_;
  std::unordered_map<SeqId, std::unique_ptr<Sequence>> live_;
  std::set<Sequence*, ByDeadline> deadlines_;  // of live sequences that have one
  std::optional<InFlight> in_flight_;
  Outbox outbox_;
  Seconds now_ = 0;  // the latest time that anyone told
  std::uint64_t num_added_ = 0;
  std::uint64_t num_scheduled_ = 0;
  Stats stats_;  // only what cannot be derived
};

}  // namespace airside
