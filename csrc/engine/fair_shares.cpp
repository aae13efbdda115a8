#include "engine/fair_shares.h"

#include <algorithm>
#include <tuple>

#include "engine/ensure.h"

namespace airside {

bool FairShares::LeastFirst::operator()(const Account* a, const Account* b) const {
  return std::tie(a->counter, a->serial) < std::tie(b->counter, b->serial);
}

FairShares::Account& FairShares::Enter(const std::string& user) {
  std::unique_ptr<Account>& account = accounts_[user];
  if (!account) {
    account = std::make_unique<Account>(Account{.user = user, .serial = num_opened_++});
  } else if (account->num_live == 0) {
    gone_.erase(account.get());
  }
  ++account->num_live;
  CatchUp(*account);
  return *account;
}

void FairShares::CatchUp(Account& account) {
  if (account.num_waiting == 0) account.counter = std::max(account.counter, virtual_time_);
}

void FairShares::Leave(Account& account) {
  Ensure(account.num_live > 0, "a user who leaves more often than he came");
  if (--account.num_live > 0) return;
  Ensure(account.num_waiting == 0, "a user who is gone while something of his waits");
  gone_.insert(&account);
  ForgetSettled();
}

void FairShares::Charge(Account& account, std::int64_t tokens) {
  Ensure(account.num_live > 0 && tokens >= 0, "a charge to somebody who is gone, or a refund");
  account.counter += tokens;
  const std::int64_t sharers = std::max<std::int64_t>(num_backlogged_, 1);
  remainder_ += tokens;
  virtual_time_ += remainder_ / sharers;
  remainder_ %= sharers;
}

void FairShares::StartWaiting(Account& account) {
  CatchUp(account);
  if (account.num_waiting++ == 0) ++num_backlogged_;
}

void FairShares::StopWaiting(Account& account) {
  Ensure(account.num_waiting > 0, "a user for whom fewer wait than nobody");
  if (--account.num_waiting == 0) --num_backlogged_;
}

// A user at or before virtual time is where a new one would start.
void FairShares::ForgetSettled() {
  while (!gone_.empty() &&
         ((*gone_.begin())->counter <= virtual_time_ || gone_.size() > kGoneMax)) {
    Account* const account = *gone_.begin();
    gone_.erase(gone_.begin());
    accounts_.erase(account->user);
  }
}

}  // namespace airside
