#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <utility>

#include "engine/fair_shares.h"
#include "engine/sequence.h"

namespace airside {

// Sequences that wait and were never admitted, in the order in which they will be: priority, then
// users by what they have been given, least first; within a user by when they are due.
class Newcomers {
 public:
  void Insert(Sequence& sequence);
  void Erase(Sequence& sequence);

  // The first of all; null: there is none. O(log users), spread over the charges to the users.
  Sequence* Front() const;

  // The first of those of a sequence's priority and user; null: there is none.
  const Sequence* FrontOfUser(const Sequence& sequence) const;

  // Whether `a`, the front of some newcomers, comes before `b`, the front of some others.
  static bool FrontComesBefore(const Sequence& a, const Sequence& b);

  struct Count {
    int sequences = 0;
    int users = 0;  // who have any of them
  };

  int size() const { return size_; }
  int NumBefore(std::int32_t priority) const;         // of smaller priority
  int NumAheadOfOwn(const Sequence& sequence) const;  // of its priority and user, due before it
  Count BesideUser(const Sequence& sequence) const;   // of its priority and other users

  template <typename Visit>
  void ForEach(Visit visit) const {
    for (const auto& [key, line] : lines_) {
      for (const Sequence* sequence : line.sequences) visit(*sequence);
    }
  }

 private:
  struct DueFirst {
    bool operator()(const Sequence* a, const Sequence* b) const;
  };
  // One user's sequences of one priority. `counter` and `serial` are what it is filed under: the
  // counter that the user had then, which may be less than today's, and its first sequence's.
  struct Line {
    FairShares::Account* account;
    std::int32_t priority;
    std::int64_t counter = 0;
    std::uint64_t serial = 0;
    std::set<Sequence*, DueFirst> sequences = {};
  };
  struct FiledFirst {
    bool operator()(const Line* a, const Line* b) const;
  };
  using Key = std::pair<std::int32_t, std::uint64_t>;  // priority, serial of the account

  static Key KeyOf(const Sequence& sequence);
  void File(Line& line) const;

  std::map<Key, Line> lines_;
  // Counters only grow, so a line is never due before its place here, and whoever looks at the
  // front files it anew until its place is right. That is why asking may move lines.
  mutable std::set<Line*, FiledFirst> order_;
  std::map<std::int32_t, Count> counts_;  // by priority
  int size_ = 0;
};

}  // namespace airside
