#pragma once

#include <cstdint>
#include <vector>

#include "engine/ensure.h"

namespace airside {

// Where the workers keep the fixed-size state of each sequence that has blocks.
class StateSlots {
 public:
  explicit StateSlots(int num_slots) : num_slots_(num_slots) {
    free_.reserve(num_slots);
    for (int slot = num_slots - 1; slot >= 0; --slot) free_.push_back(slot);
  }

  int num_slots() const { return num_slots_; }
  int num_free() const { return static_cast<int>(free_.size()); }
  int num_live() const { return num_slots_ - num_free(); }
  const std::vector<std::int32_t>& free() const { return free_; }

  std::int32_t Take() {
    Ensure(!free_.empty(), "more state slots than there are");
    const std::int32_t slot = free_.back();
    free_.pop_back();
    return slot;
  }

  void GiveBack(std::int32_t slot) {
    Ensure(0 <= slot && slot < num_slots_ && num_free() < num_slots_, "a slot that is not ours");
    free_.push_back(slot);
  }

 private:
  int num_slots_;
  std::vector<std::int32_t> free_;  // a stack; the lowest go first
};

}  // namespace airside
