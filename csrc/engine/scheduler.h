#pragma once

#include <cstdint>
#include <vector>

#include "engine/block_manager.h"
#include "engine/config.h"
#include "engine/drafter.h"
#include "engine/fair_shares.h"
#include "engine/prefixes.h"
#include "engine/sequence.h"
#include "engine/state_slots.h"
#include "engine/step.h"
#include "engine/types.h"
#include "engine/victims.h"
#include "engine/waiting_queue.h"

namespace airside {

// Decides who computes what. Knows every live sequence by its place: the waiting queue, or the
// running list. Owns the blocks and the state slots.
class Scheduler {
 public:
  struct Selection {
    Step step;                       // without rows: nothing can move now
    std::vector<Sequence*> stopped;  // ended by preemption; still to be reported
  };
  // Counts since the start.
  struct Counts {
    std::int64_t preemptions = 0;
    std::int64_t prefix_queries = 0;  // tokens looked up
    std::int64_t prefix_hits = 0;     // of them, tokens found
  };

  explicit Scheduler(const EngineConfig& config);
  Scheduler(const Scheduler&) = delete;
  Scheduler& operator=(const Scheduler&) = delete;

  // Chooses the rows of the step with this id, takes their blocks and marks them in flight. The
  // step before it may still be in flight, if it is not awaited; with none in flight there are rows
  // whenever HasWork().
  Selection Schedule(StepId id, bool is_first_in_flight, Seconds now);

  // Whether somebody has something to compute. With a step in flight it may turn out that there is
  // no room for it yet.
  bool HasWork() const;

  // Whether the prefix cache has that many of its first tokens, and it has none of its own.
  bool Finds(Sequence& sequence, std::int32_t num_tokens);

  // How many of those that run could have one more token in a step planned now.
  std::int32_t NumDecodes() const;

  // A new sequence, which must be WAITING, takes its place; it leaves once it has ended, and gives
  // back what it holds.
  void Enter(Sequence& sequence);
  void Leave(Sequence& sequence);

  // A WAITING sequence that has changed takes its place in the queue again.
  void Enqueue(Sequence& sequence);

  // The sequence leaves the queue or the running list, to be changed or ended.
  void Withdraw(Sequence& sequence);

  // A RUNNING sequence that has computed all that may be waits again, with its blocks.
  void ParkIfIdle(Sequence& sequence);

  // So many of its last tokens were rejected drafts: they were never there.
  void RollBack(Sequence& sequence, std::int32_t num_rejected);

  // Tells the prefix cache of blocks that are full now.
  void Publish(Sequence& sequence) { prefixes_.Publish(sequence); }

  // The workers are gone: this one waits again, with nothing. It must be withdrawn.
  void StartOver(Sequence& sequence, Seconds now);
  // And nothing of what they had can be shared, once all have started over.
  void ForgetContents() { blocks_.ForgetContents(); }

  const WaitingQueue& queue() const { return queue_; }
  const std::vector<Sequence*>& running() const { return running_; }
  const BlockManager& blocks() const { return blocks_; }
  const StateSlots& slots() const { return slots_; }
  const Drafter& drafter() const { return drafter_; }
  const Counts& counts() const { return counts_; }

 private:
  struct Planning : Selection {
    Seconds now = 0;
    std::int32_t tokens_left = 0;
    std::int32_t prompt_tokens_left = 0;  // of them, those for prompts; below 0 behind drafts
    std::int32_t num_sampling = 0;        // rows so far
    std::int32_t num_decodes_left = 0;    // still to be looked at: each needs a token
    bool short_of_blocks = false;         // somebody that runs was preempted, or sits this step out
  };

  void SelectRows(Planning& planning);
  void SelectDecodes(Planning& planning);
  void SelectPrompts(Planning& planning);
  void AdmitPrompts(Planning& planning);
  bool Admit(Sequence& sequence, Planning& planning);
  void TradeIn(Sequence& sequence);
  void Start(Sequence& sequence, std::vector<BlockId> shared, std::int32_t num_new,
             Planning& planning);
  bool PromptsComeFirst();

  std::int32_t PromptTokens(const Planning& planning) const;
  std::int32_t FirstToCompute(Sequence& sequence);
  std::int32_t NextChunk(const Sequence& sequence, std::int32_t begin,
                         std::int64_t tokens_left) const;
  int BlocksMissing(const Sequence& sequence, std::int32_t num_new) const;

  bool TryRow(Sequence& sequence, std::int32_t num_new, Planning& planning);
  Row& AddRow(Sequence& sequence, std::int32_t num_new, Planning& planning);
  void AddDrafts(Row& row, Planning& planning);
  void AddScores(Row& row) const;
  void Charge(Sequence& sequence, std::int32_t end);

  bool MakeRoom(const Sequence& taker, int blocks_wanted, bool from_running, Planning& planning);
  Sequence* FindSlotHolder(const Sequence& taker, const Planning& planning) const;
  bool IsIdle(const Sequence& waiting) const;
  void Preempt(Sequence& victim, Planning& planning);

  void Release(Sequence& sequence);
  void AddToRunning(Sequence& sequence);
  void RemoveFromRunning(const Sequence& sequence);

  const EngineConfig config_;
  BlockManager blocks_;
  StateSlots slots_;
  Prefixes prefixes_;
  Drafter drafter_;
  Victims victims_;
  FairShares shares_;
  WaitingQueue queue_;
  std::vector<Sequence*> running_;  // in order
  std::int64_t next_turn_ = 0;
  Counts counts_;
};

}  // namespace airside
