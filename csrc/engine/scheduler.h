#pragma once

#include <cstdint>
#include <vector>

#include "engine/block_manager.h"
#include "engine/config.h"
#include "engine/sequence.h"
#include "engine/waiting_queue.h"

namespace airside {

// One sequence's part in a step: tokens [num_computed, num_computed + num_new).
struct Row {
  Sequence* sequence;
  std::int32_t num_new;

  // Whether the row computes the last token there is, so that the next one can be sampled.
  bool ReachesEnd() const { return sequence->cache.num_computed + num_new == sequence->Length(); }
};

// Decides who computes what. Knows every live sequence by its place: the waiting queue, or the
// running list. Owns the blocks.
class Scheduler {
 public:
  struct Selection {
    std::vector<Row> rows;
    std::vector<Sequence*> stopped;  // ended by preemption; still to be reported
  };

  explicit Scheduler(const EngineConfig& config);

  // Chooses the rows of one step, takes their blocks and marks them in flight. No step may be in
  // flight. Returns rows whenever HasWork().
  Selection Schedule();

  bool HasWork() const { return !running_.empty() || queue_.Front(config_.strict_fifo); }

  // A WAITING sequence, new or changed, takes its place in the queue.
  void Enqueue(Sequence& sequence);

  // The sequence leaves the queue or the running list, to be changed or ended.
  void Withdraw(Sequence& sequence);

  // A RUNNING sequence that has computed all that may be waits again, with its blocks.
  void ParkIfIdle(Sequence& sequence);

  // All KV is lost: running sequences wait again, and nobody holds a block.
  void ForgetCaches();

  // Gives back what the sequence holds. It must not be in the queue.
  void Release(Sequence& sequence);

  const WaitingQueue& queue() const { return queue_; }
  const std::vector<Sequence*>& running() const { return running_; }
  const BlockManager& blocks() const { return blocks_; }
  std::int64_t num_preemptions() const { return num_preemptions_; }

 private:
  struct Step : Selection {
    std::int32_t tokens_left = 0;
    bool short_of_blocks = false;  // somebody that runs was preempted, or has to sit this step out
  };

  void SelectRows(Step& step);
  void SelectDecodes(Step& step);
  void SelectPrompts(Step& step);
  void AdmitPrompts(Step& step);
  bool PromptsComeFirst() const;

  std::int32_t NextChunk(const Sequence& sequence, std::int32_t tokens_left) const;
  int BlocksMissing(const Sequence& sequence, std::int32_t num_new) const;

  bool TryRow(Sequence& sequence, std::int32_t num_new, Step& step);
  void AddRow(Sequence& sequence, std::int32_t num_new, Step& step);

  bool MakeRoom(const Sequence& taker, int blocks_wanted, bool from_running, Step& step);
  std::vector<Sequence*> FindVictims(const Sequence& taker, int blocks_wanted,
                                     bool from_running) const;
  void Preempt(Sequence& victim, Step& step);

  void AddToRunning(Sequence& sequence);
  void RemoveFromRunning(const Sequence& sequence);

  const EngineConfig config_;
  BlockManager blocks_;
  WaitingQueue queue_;
  std::vector<Sequence*> running_;  // in order
  std::int64_t num_preemptions_ = 0;
};

}  // namespace airside
