#pragma once

#include <cstdint>
#include <set>

#include "engine/sequence.h"

namespace airside {

// Sequences that wait, in order; those that cannot move (parked) apart from those that can, so that
// a step looks at none that it cannot use. A sequence is filed by what it is at the time: whoever
// changes its readiness, length or cache takes it out first and puts it back after.
class WaitingQueue {
 public:
  using Ordered = std::set<Sequence*, InOrder>;

  void Insert(Sequence& sequence);
  void Erase(Sequence& sequence);

  // The first that can move. Under `strict` nobody passes a parked one. Null: nobody.
  Sequence* Front(bool strict) const;

  int size() const { return static_cast<int>(schedulable_.size() + parked_.size()); }
  std::int64_t num_tokens() const { return num_tokens_; }

  // Waiting sequences ahead of this one, which must wait here. Counts from the near end: who asks
  // has usually just come.
  int Position(const Sequence& sequence) const;

  const Ordered& schedulable() const { return schedulable_; }
  const Ordered& parked() const { return parked_; }
  const Ordered& holding() const { return holding_; }

 private:
  Ordered schedulable_;
  Ordered parked_;
  Ordered holding_;  // of both, those with blocks
  std::int64_t num_tokens_ = 0;
};

}  // namespace airside
