#include "engine/sim/leaf_checks.h"

#include <algorithm>
#include <cstddef>
#include <deque>
#include <span>
#include <string>
#include <unordered_set>
#include <vector>

#include "engine/block_key.h"
#include "engine/block_manager.h"
#include "engine/ensure.h"
#include "engine/fair_shares.h"
#include "engine/ngram_index.h"
#include "engine/sim/dice.h"

namespace airside::sim {
namespace {

std::vector<TokenId> ProposePlainly(const std::vector<TokenId>& tokens, int count) {
  const auto size = static_cast<int>(tokens.size());
  for (int length = std::min(NgramIndex::kLongest, size); length >= NgramIndex::kShortest;
       --length) {
    for (int end = size - 1; end >= length; --end) {
      if (!std::equal(tokens.end() - length, tokens.end(), tokens.begin() + end - length)) continue;
      std::vector<TokenId> all = tokens;
      for (int i = 0; i < count; ++i) all.push_back(all[end + i]);
      return {all.end() - count, all.end()};
    }
  }
  return {};
}

void CheckNgrams(Dice& dice) {
  for (int run = 0; run < 100; ++run) {
    NgramIndex index;
    std::vector<TokenId> tokens;
    const int vocabulary = dice.Draw(1, 6);
    for (int i = 0; i < 40; ++i) {
      tokens.push_back(dice.Draw(0, vocabulary));
      index.Append(tokens.back());
      Ensure(index.Propose(5) == ProposePlainly(tokens, 5), "n-grams: another proposal");
    }
  }
}

void CheckKeys() {
  std::unordered_set<BlockKey> seen;
  for (const std::string& salt : {std::string(), std::string(1, '\0'), std::string("a")}) {
    BlockKey key = RootKey(salt);
    for (std::uint64_t i = 0; i < 20'000; ++i) {
      Ensure(seen.insert(key).second, "keys: two contents with one key");
      key = NextKey(key, std::vector<std::uint64_t>{i % 3, 0, i % 2});
    }
  }
  const std::vector<std::uint64_t> ab{1, 2};
  const std::vector<std::uint64_t> ba{2, 1};
  Ensure(!(NextKey(RootKey(""), ab) == NextKey(RootKey(""), ba)), "keys: order does not count");
}

// Tables with references counted one by one.
class PlainTables {
 public:
  explicit PlainTables(Dice& dice)
      : dice_(dice), num_blocks_(dice.Draw(1, 12)), blocks_(num_blocks_, 4, /*caching=*/true) {}

  void Step() {
    const int act = dice_.Draw(1, 40);
    if (act <= 10) {
      const int count = dice_.Draw(0, 3);
      if (blocks_.CanAllocate(count)) blocks_.Allocate(count, tables_.emplace_back());
    } else if (act <= 20 && !tables_.empty()) {
      const auto at = tables_.begin() + dice_.Draw(0, static_cast<int>(tables_.size()) - 1);
      blocks_.Free(*at);
      tables_.erase(at);
    } else if (act <= 30 && !tables_.empty()) {
      for (const BlockId block : tables_.back()) blocks_.Publish(block, DrawKeys(1)[0]);
    } else if (act <= 39) {
      const std::vector<BlockKey> keys = DrawKeys(dice_.Draw(1, 3));
      blocks_.Share(std::span(keys).first(blocks_.CountHits(keys)), tables_.emplace_back());
    } else {
      blocks_.ForgetContents();
      Ensure(blocks_.num_cached() == 0, "blocks: content outlived the workers");
    }
    Compare();
  }

 private:
  std::vector<BlockKey> DrawKeys(int count) {
    std::vector<BlockKey> keys(count);
    for (BlockKey& key : keys) key.lo = static_cast<std::uint64_t>(dice_.Draw(0, 9));
    return keys;
  }

  void Compare() const {
    blocks_.Check();
    std::vector<int> references(num_blocks_);
    for (const auto& table : tables_) {
      for (const BlockId block : table) ++references[static_cast<std::size_t>(block)];
    }
    for (int id = 0; id < num_blocks_; ++id) {
      Ensure(blocks_.References(BlockId{id}) == references[id], "blocks: references miscounted");
    }
    const auto num_free = std::count(references.begin(), references.end(), 0);
    Ensure(blocks_.num_free() == num_free, "blocks: free ones miscounted");
  }

  Dice& dice_;
  int num_blocks_;
  BlockManager blocks_;
  std::vector<std::vector<BlockId>> tables_;
};

// Users who come once do not pile up, also while one of old is far ahead of them.
void CheckShares() {
  FairShares shares;
  FairShares::Account& old = shares.Enter("old");
  shares.Charge(old, 5000);
  shares.StartWaiting(old);
  std::deque<FairShares::Account*> waiting;
  for (int i = 0; i < 20'000; ++i) {
    FairShares::Account& user = shares.Enter("user " + std::to_string(i));
    shares.StartWaiting(user);
    waiting.push_back(&user);
    if (waiting.size() <= 50) continue;
    FairShares::Account& served = *waiting.front();
    waiting.pop_front();
    shares.StopWaiting(served);
    shares.Charge(served, 100);
    shares.Leave(served);
    Ensure(shares.num_accounts() <= 52 + FairShares::kGoneMax, "shares: users pile up");
  }
  Ensure(waiting.back()->counter > old.counter, "shares: new users stay ahead of an old one");
  Ensure(shares.num_accounts() < 500, "shares: settled users are not forgotten");
}

}  // namespace

void CheckLeaves(std::uint64_t seed) {
  Dice dice(seed);
  CheckNgrams(dice);
  CheckKeys();
  CheckShares();
  for (int run = 0; run < 50; ++run) {
    PlainTables tables(dice);
    for (int i = 0; i < 200; ++i) tables.Step();
  }
}

}  // namespace airside::sim
