#include "kernels/cpu/team.h"

#include <sched.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <exception>

#ifdef _OPENMP
#include <omp.h>
#endif

namespace airside::cpu {
namespace {

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Spins until holds(). After some 50 microseconds, on a core that others want, they get it; after
// some milliseconds, as when ranks wait for one another, it sleeps between two looks.
template <typename Condition>
void await(const Condition& holds) {
  constexpr int kSpins = 4000;
  constexpr int kYields = 4000;
  constexpr timespec kSleep{.tv_sec = 0, .tv_nsec = 50'000};
  for (int look = 0; !holds(); ++look) {
    if (look < kSpins) {
      pause();
    } else if (look < kSpins + kYields) {
      sched_yield();
    } else {
      nanosleep(&kSleep, nullptr);
    }
  }
}

// The tasks of one operator after another. Which operator, how many tasks it has, and which is the
// next, are one word, so that whoever takes a task knows whose it is. While a task is not done the
// leader does not go on, so that what `job_` says belongs to it.
class SharingTeam final : public Team {
 public:
  explicit SharingTeam(int size) : size_(size) {}

  int size() const override { return size_; }

  void share(int64_t count, void (*task)(const void*, int64_t), const void* context) override {
    const int64_t each = count / kTasksMax + 1;
    const auto num_tasks = static_cast<uint64_t>((count + each - 1) / each);
    job_ = {task, context, count, each};
    done_.store(0, std::memory_order_relaxed);
    state_.store(num_tasks << kTaskBits, std::memory_order_release);
    while (take_one()) {
    }
    await([&] { return done_.load(std::memory_order_acquire) == num_tasks; });
  }

  void help() {
    while (!has_ended_.load(std::memory_order_acquire)) {
      await([&] { return has_task(state_.load(std::memory_order_relaxed)) || has_ended_.load(); });
      take_one();
    }
  }

  void end() { has_ended_.store(true, std::memory_order_release); }

 private:
  static constexpr int kTaskBits = 24;
  static constexpr uint64_t kTaskMask = (uint64_t{1} << kTaskBits) - 1;
  static constexpr int64_t kTasksMax = 1 << 20;

  struct Job {
    void (*task)(const void*, int64_t);
    const void* context;
    int64_t count;
    int64_t each;
  };

  static bool has_task(uint64_t state) { return (state & kTaskMask) < state >> kTaskBits; }

  // Whether there was one.
  bool take_one() noexcept {
    if (!has_task(state_.load(std::memory_order_relaxed))) return false;
    const uint64_t state = state_.fetch_add(1, std::memory_order_acq_rel);
    if (!has_task(state)) return false;
    const int64_t begin = static_cast<int64_t>(state & kTaskMask) * job_.each;
    const int64_t end = std::min(begin + job_.each, job_.count);
    for (int64_t i = begin; i < end; ++i) job_.task(job_.context, i);
    done_.fetch_add(1, std::memory_order_release);
    return true;
  }

  const int size_;
  Job job_{};
  alignas(64) std::atomic<uint64_t> state_{0};  // tasks << kTaskBits | the next one
  alignas(64) std::atomic<uint64_t> done_{0};
  alignas(64) std::atomic<bool> has_ended_{false};
};

}  // namespace

Team*& led_team() {
  thread_local Team* team = nullptr;
  return team;
}

void lead_team(void (*body)(const void* context), const void* context) {
#ifdef _OPENMP
  SharingTeam team(omp_get_max_threads());
  std::exception_ptr failure;
#pragma omp parallel num_threads(team.size())
  {
    if (omp_get_thread_num() == 0) {
      led_team() = &team;
      try {
        body(context);
      } catch (...) {
        failure = std::current_exception();
      }
      led_team() = nullptr;
      team.end();
    } else {
      team.help();
    }
  }
  if (failure != nullptr) std::rethrow_exception(failure);
#else
  body(context);
#endif
}

}  // namespace airside::cpu
