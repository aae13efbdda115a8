#include "engine/waiting_queue.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <tuple>

#include "engine/ensure.h"

namespace airside {
namespace {

bool IsNewcomer(const Sequence& sequence) { return !sequence.schedule.turn; }

// Whether it takes part in the turns that users take.
bool WaitsForTurn(const Sequence& sequence) {
  return IsNewcomer(sequence) && sequence.Schedulable();
}

// Which of two fronts comes first.
bool FrontComesBefore(const Sequence& a, const Sequence& b) {
  if (IsNewcomer(a) && IsNewcomer(b)) return Newcomers::FrontComesBefore(a, b);
  return ComesBefore(a, b);
}

int NumAhead(const WaitingQueue::Ordered& queue, const Sequence& sequence) {
  const auto first_ahead = std::find_if(queue.rbegin(), queue.rend(), [&](const Sequence* other) {
    return ComesBefore(*other, sequence);
  });
  return static_cast<int>(queue.size()) -
         static_cast<int>(std::distance(queue.rbegin(), first_ahead));
}

}  // namespace

bool ComesBefore(const Sequence& a, const Sequence& b) {
  static constexpr std::int64_t kAfterAllTurns = std::numeric_limits<std::int64_t>::max();
  const auto key = [](const Sequence& sequence) {
    return std::make_tuple(sequence.request.priority,
                           sequence.schedule.turn.value_or(kAfterAllTurns),
                           sequence.request.serial);
  };
  return key(a) < key(b);
}

void WaitingQueue::Kind::Insert(Sequence& sequence) {
  if (IsNewcomer(sequence)) {
    newcomers.Insert(sequence);
  } else {
    Ensure(admitted.insert(&sequence).second, "a sequence that waits twice");
  }
}

void WaitingQueue::Kind::Erase(Sequence& sequence) {
  if (IsNewcomer(sequence)) {
    newcomers.Erase(sequence);
  } else {
    Ensure(admitted.erase(&sequence) == 1, "a sequence that is not where it was filed");
  }
}

Sequence* WaitingQueue::Kind::Front() const {
  Sequence* const newcomer = newcomers.Front();
  if (admitted.empty()) return newcomer;
  Sequence* const before = *admitted.begin();
  return newcomer == nullptr || ComesBefore(*before, *newcomer) ? before : newcomer;
}

void WaitingQueue::Insert(Sequence& sequence) {
  if (WaitsForTurn(sequence)) shares_.StartWaiting(*sequence.schedule.account);
  KindOf(sequence).Insert(sequence);
  if (!sequence.cache.blocks.empty()) holding_.insert(&sequence);
  num_tokens_ += sequence.Length();
}

void WaitingQueue::Erase(Sequence& sequence) {
  KindOf(sequence).Erase(sequence);
  if (WaitsForTurn(sequence)) shares_.StopWaiting(*sequence.schedule.account);
  if (!sequence.cache.blocks.empty()) holding_.erase(&sequence);
  num_tokens_ -= sequence.Length();
}

Sequence* WaitingQueue::Front(bool strict) const {
  Sequence* const front = schedulable_.Front();
  if (front == nullptr || !strict) return front;
  const auto holds_up = [&](const Sequence* parked) {
    return parked != nullptr && FrontComesBefore(*parked, *front);
  };
  if (holds_up(parked_.Front())) return nullptr;
  // Of users with equal counters, another's parked one may be the first of all.
  if (IsNewcomer(*front) && holds_up(parked_.newcomers.FrontOfUser(*front))) return nullptr;
  return front;
}

int WaitingQueue::Position(const Sequence& sequence) const {
  const std::int32_t priority = sequence.request.priority;
  int ahead = NumAhead(schedulable_.admitted, sequence) + NumAhead(parked_.admitted, sequence) +
              schedulable_.newcomers.NumBefore(priority) + parked_.newcomers.NumBefore(priority);
  if (!IsNewcomer(sequence)) return ahead;
  int own = 0;
  Newcomers::Count others;
  for (const Newcomers* newcomers : {&schedulable_.newcomers, &parked_.newcomers}) {
    own += newcomers->NumAheadOfOwn(sequence);
    const Newcomers::Count beside = newcomers->BesideUser(sequence);
    others.sequences += beside.sequences;
    others.users = std::max(others.users, beside.users);
  }
  const std::int64_t turns = (own + std::int64_t{1}) * others.users;
  return ahead + own + static_cast<int>(std::min<std::int64_t>(others.sequences, turns));
}

}  // namespace airside
