#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/config.h"
#include "engine/encode_queue.h"
#include "engine/ending.h"
#include "engine/outbox.h"
#include "engine/request.h"
#include "engine/scheduler.h"
#include "engine/sequence.h"
#include "engine/status.h"
#include "engine/step.h"
#include "engine/step_plan.h"
#include "engine/step_result.h"
#include "engine/types.h"

namespace airside {

struct Stats {
  std::int64_t num_waiting = 0;
  std::int64_t num_running = 0;
  std::int64_t blocks_total = 0;
  std::int64_t blocks_live = 0;
  std::int64_t blocks_cached = 0;  // free, but their content can be found
  std::int64_t blocks_free = 0;    // cached ones included
  std::int64_t num_preemptions = 0;
  std::int64_t recomputed_tokens = 0;     // computed again after a preemption or a lost step
  std::int64_t steps = 0;                 // that came back
  std::int64_t prompt_tokens = 0;         // computed for the first time
  std::int64_t generation_tokens = 0;     // told to clients
  std::int64_t prefix_cache_queries = 0;  // tokens looked up
  std::int64_t prefix_cache_hits = 0;     // of them, tokens found
  std::int64_t draft_tokens = 0;          // verified
  std::int64_t accepted_tokens = 0;       // of them
  std::int64_t state_slots_total = 0;
  std::int64_t state_slots_live = 0;
  std::map<Status, std::int64_t> finished;  // every final status
};

// The state machine: every live sequence, and the steps in flight. Pure: no clock, thread, file,
// socket or random source; all times come in as arguments.
class Engine {
 public:
  explicit Engine(const EngineConfig& config);
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Takes a request in, or says why not.
  std::optional<Rejection> Add(Request request, Seconds now);

  // What an image becomes in the prompt, and then the news that its pixels are in. Both false, with
  // nothing changed, when the sequence is not live or this is known already.
  // std::invalid_argument: there is no such image, a shape with a fault, or no shape yet.
  bool SetShape(SeqId seq_id, int image_index, ImageShape shape);
  bool SetReady(SeqId seq_id, int image_index);

  // The grammar of a structured sequence is built: it may sample. To be said again after the
  // workers were lost. False when it is not live, not structured, or this is known already.
  bool SetGrammarReady(SeqId seq_id);

  // End a sequence now; false when it is not live. `Stop` is for what somebody else finds in the
  // output: of its tokens, `num_tokens` count.
  bool FailGrammar(SeqId seq_id, std::string detail);
  bool Stop(SeqId seq_id, std::int64_t num_tokens, std::string detail);
  bool Abort(SeqId seq_id, std::string cause);
  bool FailVision(SeqId seq_id, std::string detail);

  // Ends what is past its deadline; then the next step, if there may be one more in flight and
  // anything can move.
  std::optional<StepPlan> Schedule(Seconds now);

  // Closes the oldest step in flight. std::invalid_argument, with nothing changed: another step, or
  // a result that does not fit it.
  void Apply(StepId step_id, const StepResult& result, Seconds now);

  // The steps in flight, if any, and all KV are lost. Also ends what is past its deadline, so that
  // it can be called while there is nobody to compute for.
  void FailStep(Seconds now);

  std::vector<ClientOutput> TakeOutputs() { return outbox_.Take(); }

  Stats GetStats() const;
  std::optional<Status> StatusOf(SeqId seq_id) const;
  int QueuePosition(SeqId seq_id) const;
  std::vector<TokenId> OutputIds(SeqId seq_id) const;  // empty when it is not live
  std::vector<SeqId> StructuredIds() const;            // live, in order of adding
  bool HasWork() const { return MayPlan() && (scheduler_.HasWork() || WaitsForNothingElse()); }
  int StepsInFlight() const { return static_cast<int>(in_flight_.size()); }

  // Throws std::logic_error that names the first broken invariant. Looks at everything.
  void Check() const;

 private:
  struct ByDeadline {
    bool operator()(const Sequence* a, const Sequence* b) const;
  };

  std::optional<Rejection> FindQueueFull(const Request& request) const;
  Sequence* Find(SeqId seq_id) const;
  std::vector<Sequence*> InOrderOfAdding() const;
  Sequence* FindImage(SeqId seq_id, int image_index) const;
  bool MayPlan() const;

  void AwaitEncoder(Sequence& sequence, std::int32_t image_index);
  std::vector<EncodeQueue::Entry> TakeReadable(std::int32_t num_decodes);
  void LetRead(std::span<const EncodeQueue::Entry> images);
  void HoldBackUnread(std::span<const EncodeQueue::Entry> images);
  std::vector<ImageId> EncodeAhead(std::int32_t num_decodes);
  bool WaitsForNothingElse() const;

  void AdvanceClock(Seconds now);
  void EndOverdue();

  void ApplyRow(const Row& row, std::span<const TokenId> drafts, const RowResult& result);
  void TakeScores(const Row& row, const RowResult& result);
  std::optional<Ending> TakeTokens(const Row& row, std::span<const TokenId> drafts,
                                   const RowResult& result);
  std::size_t Append(Sequence& sequence, std::span<const TokenId> sampled,
                     std::span<const TokenId> drafts, std::optional<Ending>& ending) const;
  void CountComputed(const Row& row, std::int32_t num_rejected);

  bool EndIfLive(SeqId seq_id, Status status, std::string detail);
  void End(Sequence& sequence, Ending ending);
  void Dismiss(Sequence& sequence, std::int64_t completion_tokens, std::string detail);

  const EngineConfig config_;
  Scheduler scheduler_;
  std::unordered_map<SeqId, std::unique_ptr<Sequence>> live_;
  std::vector<std::unique_ptr<Sequence>> leaving_;  // ended, but rows in flight refer to them
  std::set<Sequence*, ByDeadline> deadlines_;       // of live sequences that have one
  EncodeQueue images_;                              // which may not be read yet, or were not
  std::deque<Step> in_flight_;                      // oldest first
  std::vector<SeqId> closed_;  // opened and ended, but the workers have not been told of the end
  std::vector<SeqId> seeing_;  // all their pixels have come in since anyone told the time
  Outbox outbox_;
  Seconds now_ = 0;  // the latest time that anyone told
  std::uint64_t num_added_ = 0;
  std::uint64_t num_scheduled_ = 0;
  Stats stats_;  // only what cannot be derived
};

}  // namespace airside
