#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "engine/sequence.h"
#include "engine/step.h"

namespace airside {

// Images whose pixels are in and that no step encodes yet; and, of those that were encoded ahead of
// their rows, the ones that no row has read.
class EncodeQueue {
 public:
  struct Entry {
    Sequence* sequence;
    std::int32_t image_index;

    Image& image() const { return sequence->input.images[image_index]; }
    ImageId id() const { return {sequence->request.id, image_index}; }
    // By a row that is planned, or there is nothing to read.
    bool IsRead() const {
      return sequence->ShapesKnown() && sequence->NumPlanned() > image().embeds_begin;
    }
  };

  void Add(Sequence& sequence, std::int32_t image_index) {
    waiting_.push_back({&sequence, image_index});
  }

  // Forgets all images of a sequence, or of everybody.
  void Remove(const Sequence& sequence);
  void Clear();

  // All of those that wait, or that a test picks.
  std::vector<Entry> TakeAll();
  template <typename Test>
  std::vector<Entry> TakeIf(Test test) {
    const auto picked = std::stable_partition(waiting_.begin(), waiting_.end(), std::not_fn(test));
    std::vector<Entry> taken(picked, waiting_.end());
    waiting_.erase(picked, waiting_.end());
    return taken;
  }

  // The next ones to be encoded ahead, of `most` contents: by priority, then of the user who has
  // been given least, then as their pixels came in. Of one sequence, one after another. None while
  // twice as many that come before it are unread: the workers would forget them before their rows
  // come.
  std::vector<Entry> TakeAhead(std::int32_t most);

  std::span<const Entry> waiting() const { return waiting_; }

 private:
  std::vector<Entry>::const_iterator FindNext() const;

  std::vector<Entry> waiting_;
  std::vector<Entry> unread_;
};

}  // namespace airside
