#include "kernels/cpu/team.h"

#include <atomic>
#include <utility>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "kernels/cpu/scratch.h"

namespace airside::cpu {
namespace {

// Looks before a waiting thread sleeps: some 50 microseconds, several times what an operator of a
// decode takes. Whoever is waited for that long has lost its core to another process.
constexpr int kLooks = 4000;

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class SpinningTeam final : public Team {
 public:
  explicit SpinningTeam(int size) : size_(size) {}

  int size() const override { return size_; }

  void meet() override {
    if (size_ == 1) {
      next_task_.store(0, std::memory_order_relaxed);
      return;
    }
    const int meeting = meetings_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
      arrived_.store(0, std::memory_order_relaxed);
      next_task_.store(0, std::memory_order_relaxed);
      meetings_.store(meeting + 1, std::memory_order_release);
      meetings_.notify_all();  // a look at a counter, unless somebody sleeps
      return;
    }
    for (int look = 0; look < kLooks; ++look) {
      if (meetings_.load(std::memory_order_acquire) != meeting) return;
      pause();
    }
    meetings_.wait(meeting, std::memory_order_acquire);
  }

  int64_t take_task() override { return next_task_.fetch_add(1, std::memory_order_relaxed); }

  void fail(std::exception_ptr failure) override { failure_ = std::move(failure); }

  bool has_failed() const override { return failure_ != nullptr; }

  void throw_failure() const {
    if (failure_ != nullptr) std::rethrow_exception(failure_);
  }

  float* scratch(int64_t count) override {
    meet();  // nobody reads any more what was in it
    if (this_member().index == 0) scratch_ = shared_scratch_floats(count);
    meet();
    return scratch_;
  }

 private:
  const int size_;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> meetings_{0};  // an int: what a thread can sleep on
  alignas(64) std::atomic<int64_t> next_task_{0};
  float* scratch_ = nullptr;
  std::exception_ptr failure_;  // written before a meeting, read after it
};

}  // namespace

Member& this_member() {
  thread_local Member member;
  return member;
}

void run_team(void (*body)(const void* context), const void* context) {
#ifdef _OPENMP
  SpinningTeam team(omp_get_max_threads());
#pragma omp parallel num_threads(team.size())
  {
    this_member() = {&team, omp_get_thread_num()};
    body(context);
    this_member() = {};
  }
#else
  SpinningTeam team(1);
  this_member() = {&team, 0};
  body(context);
  this_member() = {};
#endif
  team.throw_failure();
}

}  // namespace airside::cpu
