#pragma once

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>

namespace airside {

// How much each user has been given, in tokens: the virtual token counter of Sheng et al. 2024
// (arXiv 2401.00588). The next admission is for the user with the least.
//
// Virtual time is what a user who always has something waiting is given on average: each token
// moves it on by one over the number of such users. A user for whom nothing waits is put there at
// its next request, so that idling saves nothing up; nor does waiting for a picture, which counts
// as idling. And since it moves on whoever is served, a stream of ever new users, each of whom
// starts there, cannot keep an old one waiting for ever.
class FairShares {
 public:
  struct Account {
    std::string user;
    std::int64_t counter = 0;      // never shrinks
    std::int32_t num_live = 0;     // sequences
    std::int32_t num_waiting = 0;  // of them, those that were never admitted, and could be
    std::uint64_t serial = 0;  // counts the accounts; decides between equal counters of gone ones
  };

  // Of the users who are gone, so many with the largest counters are remembered at most.
  static constexpr std::size_t kGoneMax = 4096;

  // A sequence of this user is taken in: before it is put in the queue. The account stays where it
  // is until its last sequence leaves.
  Account& Enter(const std::string& user);

  // It has ended; the account may be gone after this.
  void Leave(Account& account);

  // So many tokens were computed for the user.
  void Charge(Account& account, std::int64_t tokens);

  // The queue's to call: a sequence that was never admitted waits and could move, or no more.
  void StartWaiting(Account& account);
  void StopWaiting(Account& account);

  std::size_t num_accounts() const { return accounts_.size(); }

 private:
  struct LeastFirst {
    bool operator()(const Account* a, const Account* b) const;
  };

  void CatchUp(Account& account);
  void ForgetSettled();

  std::unordered_map<std::string, std::unique_ptr<Account>> accounts_;
  std::set<Account*, LeastFirst> gone_;  // accounts without a live sequence
  std::int64_t num_backlogged_ = 0;      // users for whom something waits that could move
  std::int64_t virtual_time_ = 0;
  std::int64_t remainder_ = 0;  // tokens that have not moved virtual time yet
  std::uint64_t num_opened_ = 0;
};

}  // namespace airside
