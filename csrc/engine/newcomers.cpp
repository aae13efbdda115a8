#include "engine/newcomers.h"

#include <algorithm>
#include <iterator>
#include <tuple>

#include "engine/ensure.h"

namespace airside {
namespace {

// A request without a deadline counts as due so long after its arrival, so that those with one
// cannot keep it waiting for ever.
constexpr Seconds kPatience = 60;

Seconds DueAt(const Sequence::RequestGroup& request) {
  const Seconds patient = request.arrival + kPatience;
  return request.deadline ? std::min(*request.deadline, patient) : patient;
}

FairShares::Account& AccountOf(const Sequence& sequence) {
  Ensure(sequence.schedule.account != nullptr, "a sequence of no user");
  return *sequence.schedule.account;
}

}  // namespace

bool Newcomers::DueFirst::operator()(const Sequence* a, const Sequence* b) const {
  const auto key = [](const Sequence::RequestGroup& request) {
    return std::make_tuple(DueAt(request), request.arrival, request.serial);
  };
  return key(a->request) < key(b->request);
}

bool Newcomers::FiledFirst::operator()(const Line* a, const Line* b) const {
  return std::tie(a->priority, a->counter, a->serial) <
         std::tie(b->priority, b->counter, b->serial);
}

Newcomers::Key Newcomers::KeyOf(const Sequence& sequence) {
  return {sequence.request.priority, AccountOf(sequence).serial};
}

void Newcomers::File(Line& line) const {
  line.counter = line.account->counter;
  line.serial = (*line.sequences.begin())->request.serial;
  Ensure(order_.insert(&line).second, "two lines that start with the same sequence");
}

void Newcomers::Insert(Sequence& sequence) {
  const auto [at, is_new] =
      lines_.try_emplace(KeyOf(sequence), Line{&AccountOf(sequence), sequence.request.priority});
  Line& line = at->second;
  if (!is_new) order_.erase(&line);
  Ensure(line.sequences.insert(&sequence).second, "a sequence that waits twice");
  File(line);
  Count& count = counts_[line.priority];
  ++count.sequences;
  count.users += is_new ? 1 : 0;
  ++size_;
}

void Newcomers::Erase(Sequence& sequence) {
  const auto at = lines_.find(KeyOf(sequence));
  Ensure(at != lines_.end(), "a sequence that is not where it was filed");
  Line& line = at->second;
  order_.erase(&line);
  Ensure(line.sequences.erase(&sequence) == 1, "a sequence that is not where it was filed");
  const auto count = counts_.find(line.priority);
  if (--count->second.sequences == 0) {
    counts_.erase(count);
  } else if (line.sequences.empty()) {
    --count->second.users;
  }
  --size_;
  if (line.sequences.empty()) {
    lines_.erase(at);
  } else {
    File(line);
  }
}

Sequence* Newcomers::Front() const {
  while (!order_.empty()) {
    Line& line = **order_.begin();
    if (line.counter == line.account->counter) return *line.sequences.begin();
    order_.erase(order_.begin());
    File(line);
  }
  return nullptr;
}

const Sequence* Newcomers::FrontOfUser(const Sequence& sequence) const {
  const auto line = lines_.find(KeyOf(sequence));
  return line == lines_.end() ? nullptr : *line->second.sequences.begin();
}

bool Newcomers::FrontComesBefore(const Sequence& a, const Sequence& b) {
  if (a.request.priority == b.request.priority && &AccountOf(a) == &AccountOf(b)) {
    return DueFirst{}(&a, &b);
  }
  const auto key = [](const Sequence& front) {
    return std::make_tuple(front.request.priority, AccountOf(front).counter, front.request.serial);
  };
  return key(a) < key(b);
}

int Newcomers::NumBefore(std::int32_t priority) const {
  int num_before = 0;
  for (auto it = counts_.begin(); it != counts_.end() && it->first < priority; ++it) {
    num_before += it->second.sequences;
  }
  return num_before;
}

Newcomers::Count Newcomers::BesideUser(const Sequence& sequence) const {
  const auto of_priority = counts_.find(sequence.request.priority);
  Count count = of_priority == counts_.end() ? Count{} : of_priority->second;
  const auto own = lines_.find(KeyOf(sequence));
  if (own == lines_.end()) return count;
  count.sequences -= static_cast<int>(own->second.sequences.size());
  count.users -= 1;
  return count;
}

int Newcomers::NumAheadOfOwn(const Sequence& sequence) const {
  const auto line = lines_.find(KeyOf(sequence));
  if (line == lines_.end()) return 0;
  const auto& own = line->second.sequences;
  const auto first_ahead = std::find_if(own.rbegin(), own.rend(), [&](const Sequence* other) {
    return DueFirst{}(other, &sequence);
  });
  return static_cast<int>(own.size()) - static_cast<int>(std::distance(own.rbegin(), first_ahead));
}

}  // namespace airside
