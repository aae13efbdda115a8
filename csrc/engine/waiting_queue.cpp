#include "engine/waiting_queue.h"

#include <algorithm>

#include "engine/ensure.h"

namespace airside {
namespace {

int NumBehind(const WaitingQueue::Ordered& queue, const Sequence& sequence) {
  const auto first_ahead = std::find_if(queue.rbegin(), queue.rend(), [&](const Sequence* other) {
    return !ComesBefore(sequence, *other);
  });
  return static_cast<int>(std::distance(queue.rbegin(), first_ahead));
}

}  // namespace

void WaitingQueue::Insert(Sequence& sequence) {
  const bool inserted = (sequence.Schedulable() ? schedulable_ : parked_).insert(&sequence).second;
  Ensure(inserted, "a sequence that waits twice");
  if (!sequence.cache.blocks.empty()) holding_.insert(&sequence);
  num_tokens_ += sequence.Length();
}

void WaitingQueue::Erase(Sequence& sequence) {
  const auto erased = (sequence.Schedulable() ? schedulable_ : parked_).erase(&sequence);
  Ensure(erased == 1, "a sequence that is not where it was filed");
  if (!sequence.cache.blocks.empty()) holding_.erase(&sequence);
  num_tokens_ -= sequence.Length();
}

Sequence* WaitingQueue::Front(bool strict) const {
  if (schedulable_.empty()) return nullptr;
  Sequence* const front = *schedulable_.begin();
  if (strict && !parked_.empty() && ComesBefore(**parked_.begin(), *front)) return nullptr;
  return front;
}

int WaitingQueue::Position(const Sequence& sequence) const {
  return size() - 1 - NumBehind(schedulable_, sequence) - NumBehind(parked_, sequence);
}

}  // namespace airside
