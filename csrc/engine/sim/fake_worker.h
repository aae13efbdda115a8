#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "engine/config.h"
#include "engine/ensure.h"
#include "engine/step_plan.h"
#include "engine/types.h"

namespace airside::sim {

// What the fake model knows of a prefix: a hash of every token and picture in it. It stands for the
// keys and values of a position, so a wrong block, token or picture shows in the next token.
using Digest = std::uint64_t;

inline constexpr TokenId kImageToken = 7;
inline constexpr TokenId kVocabulary = 40;

inline Digest Mix(Digest digest, std::uint64_t value) {
  digest = (digest ^ (value + 0x9E3779B97F4A7C15ULL + (digest << 6))) * 0xBF58476D1CE4E5B9ULL;
  return digest ^ (digest >> 29);
}

inline Digest MixEmbedding(Digest digest, SeqId seq_id, std::int32_t image, std::int32_t position) {
  digest = Mix(digest, static_cast<std::uint64_t>(seq_id) + 1'000'000);
  return Mix(Mix(digest, static_cast<std::uint64_t>(image)), static_cast<std::uint64_t>(position));
}

inline TokenId NextToken(Digest digest, const std::vector<TokenId>& banned) {
  auto token = static_cast<TokenId>(digest % kVocabulary);
  while (std::find(banned.begin(), banned.end(), token) != banned.end()) {
    token = (token + 1) % kVocabulary;
  }
  return token;
}

// Computes plans on a KV pool of digests. Keeps nothing else between steps.
class FakeWorker {
 public:
  explicit FakeWorker(const EngineConfig& config)
      : block_size_(config.block_size),
        image_token_id_(config.image_token_id),
        pool_(static_cast<std::size_t>(config.PoolTokens())) {}

  // A new process: whatever the pool held is gone.
  void Restart() { std::fill(pool_.begin(), pool_.end(), Digest{0xDEAD}); }

  std::vector<TokenId> Execute(const StepPlan& plan) {
    std::vector<TokenId> sampled;
    Pictures pictures(plan.images);
    std::size_t next_token = 0;
    std::size_t table = 0;
    for (std::size_t row = 0; row < plan.seq_ids.size(); ++row) {
      const std::int32_t begin = plan.num_computed[row];
      Digest digest = begin == 0 ? 0 : At(plan, table, begin - 1);
      for (std::int32_t position = begin; position < begin + plan.num_new[row]; ++position) {
        const TokenId token = plan.token_ids.at(next_token++);
        digest = token == image_token_id_ ? pictures.MixNext(digest, plan.seq_ids[row])
                                          : Mix(digest, static_cast<std::uint64_t>(token));
        At(plan, table, position) = digest;
      }
      table += plan.num_blocks[row];
      if (plan.sampled[row] == 1) {
        const auto banned = plan.banned.find(static_cast<std::int32_t>(sampled.size()));
        sampled.push_back(NextToken(
            digest, banned == plan.banned.end() ? std::vector<TokenId>{} : banned->second));
      }
    }
    Ensure(next_token == plan.token_ids.size(), "the plan has more tokens than its rows");
    Ensure(table == plan.block_tables.size(), "the plan has more blocks than its tables");
    Ensure(pictures.AllUsed(), "the plan names a picture that no token needs");
    return sampled;
  }

 private:
  // Hands out the embeddings of a plan's images, one by one.
  class Pictures {
   public:
    explicit Pictures(const std::vector<ImageSlice>& slices) : slices_(slices) {}

    Digest MixNext(Digest digest, SeqId seq_id) {
      Ensure(slice_ < slices_.size(), "an image token without a picture");
      const ImageSlice& slice = slices_[slice_];
      Ensure(slice.seq_id == seq_id, "an image token with somebody else's picture");
      digest = MixEmbedding(digest, seq_id, slice.image_index, slice.embed_start + used_);
      if (++used_ == slice.embed_count) {
        ++slice_;
        used_ = 0;
      }
      return digest;
    }

    bool AllUsed() const { return slice_ == slices_.size() && used_ == 0; }

   private:
    const std::vector<ImageSlice>& slices_;
    std::size_t slice_ = 0;
    std::int32_t used_ = 0;
  };

  Digest& At(const StepPlan& plan, std::size_t table, std::int32_t position) {
    const BlockId block = plan.block_tables.at(table + position / block_size_);
    return pool_.at(static_cast<std::size_t>(block) * block_size_ + position % block_size_);
  }

  int block_size_;
  std::optional<TokenId> image_token_id_;
  std::vector<Digest> pool_;
};

}  // namespace airside::sim
