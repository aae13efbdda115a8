#pragma once

#include <cstdint>
#include <set>

#include "engine/fair_shares.h"
#include "engine/newcomers.h"
#include "engine/sequence.h"

namespace airside {

// Sequences that wait, in order: by priority, those that were admitted before ahead of those that
// were not. Those that cannot move (parked) are kept apart from those that can, so that a step
// looks at none that it cannot use. A sequence is filed by what it is at the time: whoever changes
// its turn, readiness, length or cache takes it out first and puts it back after.
class WaitingQueue {
 public:
  using Ordered = std::set<Sequence*, InOrder>;

  explicit WaitingQueue(FairShares& shares) : shares_(shares) {}

  void Insert(Sequence& sequence);
  void Erase(Sequence& sequence);

  // The first that can move. Under `strict` nobody passes a parked one. Null: nobody.
  Sequence* Front(bool strict) const;

  int size() const { return schedulable_.size() + parked_.size(); }
  std::int64_t num_tokens() const { return num_tokens_; }

  // Waiting sequences ahead of this one, which must wait here. Exact where there is one user; of
  // other users' newcomers it is an estimate that gives each of them as many turns as this one's.
  // Counts from the near end: who asks has usually just come.
  int Position(const Sequence& sequence) const;

  // Those with blocks, all of which were admitted before, in order.
  const Ordered& holding() const { return holding_; }

  // `visit(sequence, is_parked)` for every one that waits.
  template <typename Visit>
  void ForEach(Visit visit) const {
    schedulable_.ForEach([&](const Sequence& sequence) { visit(sequence, false); });
    parked_.ForEach([&](const Sequence& sequence) { visit(sequence, true); });
  }

 private:
  struct Kind {
    Ordered admitted;
    Newcomers newcomers;

    void Insert(Sequence& sequence);
    void Erase(Sequence& sequence);
    Sequence* Front() const;
    int size() const { return static_cast<int>(admitted.size()) + newcomers.size(); }

    template <typename Visit>
    void ForEach(Visit visit) const {
      for (const Sequence* sequence : admitted) visit(*sequence);
      newcomers.ForEach(visit);
    }
  };

  Kind& KindOf(const Sequence& sequence) { return sequence.Schedulable() ? schedulable_ : parked_; }

  FairShares& shares_;
  Kind schedulable_;
  Kind parked_;
  Ordered holding_;
  std::int64_t num_tokens_ = 0;
};

}  // namespace airside
