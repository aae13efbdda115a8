#include "engine/encode_queue.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "engine/fair_shares.h"

namespace airside {
namespace {

// Whether its sequence can compute all that is before it.
bool IsNextOfItsSequence(const EncodeQueue::Entry& entry) {
  const Image& image = entry.image();
  return image.WaitsForEncoder() && entry.sequence->ReadyLength() == image.embeds_begin;
}

bool ComesFirst(const EncodeQueue::Entry& a, const EncodeQueue::Entry& b) {
  const auto key = [](const Sequence& sequence) {
    return std::make_tuple(sequence.request.priority, sequence.schedule.account->counter);
  };
  return key(*a.sequence) < key(*b.sequence);
}

}  // namespace

void EncodeQueue::Remove(const Sequence& sequence) {
  const auto is_its = [&](const Entry& entry) { return entry.sequence == &sequence; };
  std::erase_if(waiting_, is_its);
  std::erase_if(unread_, is_its);
}

void EncodeQueue::Clear() {
  waiting_.clear();
  unread_.clear();
}

std::vector<EncodeQueue::Entry> EncodeQueue::TakeAll() { return std::exchange(waiting_, {}); }

std::vector<EncodeQueue::Entry> EncodeQueue::TakeAhead(std::int32_t most) {
  std::erase_if(unread_, [](const Entry& entry) { return entry.IsRead(); });
  std::vector<Entry> taken;
  for (std::int32_t i = 0; i < most; ++i) {
    const auto next = FindNext();
    if (next == waiting_.end()) break;
    const auto num_before = std::count_if(unread_.begin(), unread_.end(), [&](const Entry& entry) {
      return !ComesFirst(*next, entry);
    });
    if (num_before >= 2 * most) break;
    const std::uint64_t content = next->image().content;
    // Equal ones cost nothing more.
    const std::vector<Entry> equals =
        TakeIf([&](const Entry& entry) { return entry.image().content == content; });
    taken.insert(taken.end(), equals.begin(), equals.end());
    unread_.insert(unread_.end(), equals.begin(), equals.end());
  }
  return taken;
}

std::vector<EncodeQueue::Entry>::const_iterator EncodeQueue::FindNext() const {
  auto next = waiting_.end();
  for (auto it = waiting_.begin(); it != waiting_.end(); ++it) {
    if (IsNextOfItsSequence(*it) && (next == waiting_.end() || ComesFirst(*it, *next))) next = it;
  }
  return next;
}

}  // namespace airside
