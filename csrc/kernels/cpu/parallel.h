#pragma once

#include <cstdint>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "kernels/cpu/scratch.h"
#include "kernels/cpu/team.h"

// Loops over threads: those of the team, where a program runs (team.h), and for an operator that is
// called by itself those of torch's own OpenMP pool. torch has loaded libgomp before this library
// is, so both use one set of threads and torch.set_num_threads counts here too. The region always
// takes the whole team and lets some members do nothing, because libgomp ends and restarts threads
// when the team's size changes.
namespace airside::cpu::AIRSIDE_ISA {

// In element operations of about half a nanosecond: what pays for another thread. To wake one takes
// microseconds, more on a machine whose cores are busy; helpers are awake.
inline constexpr int64_t kCostPerThread = 32768;
inline constexpr int64_t kCostPerHelper = 4096;

inline bool worth_threads([[maybe_unused]] int64_t count, [[maybe_unused]] int64_t cost) {
#ifdef _OPENMP
  return count > 1 && cost >= 2 * kCostPerThread && omp_get_max_threads() > 1 && !omp_in_parallel();
#else
  return false;
#endif
}

// Of whoever would take part in a loop.
inline int64_t num_threads() {
  if (const Team* const team = led_team(); team != nullptr) return team->size();
#ifdef _OPENMP
  return omp_in_parallel() ? 1 : omp_get_max_threads();
#else
  return 1;
#endif
}

inline int64_t num_parts(int64_t count, int64_t cost, int64_t cost_per_part, int64_t most) {
  const int64_t wanted = cost / cost_per_part;
  const int64_t fewer = wanted < count ? wanted : count;
  return fewer < most ? fewer : most;
}

// Calls task(i) for each i of [0, count) with the helpers of the team that this thread leads.
template <typename Task>
void share(Team& team, int64_t count, const Task& task) {
  team.share(
      count, [](const void* context, int64_t i) { (*static_cast<const Task*>(context))(i); },
      &task);
}

// Calls body(begin, end) for parts of [0, count), each item of which costs `cost_each`.
template <typename Body>
void parallel_for(int64_t count, int64_t cost_each, const Body& body) {
  if (Team* const team = led_team(); team != nullptr) {
    const int64_t parts = num_parts(count, count * cost_each, kCostPerHelper, team->size());
    if (parts < 2) return body(int64_t{0}, count);
    return share(*team, parts,
                 [&](int64_t part) { body(count * part / parts, count * (part + 1) / parts); });
  }
  if (!worth_threads(count, count * cost_each)) return body(int64_t{0}, count);
#ifdef _OPENMP
#pragma omp parallel
  {
    const int64_t parts =
        num_parts(count, count * cost_each, kCostPerThread, omp_get_num_threads());
    const int64_t part = omp_get_thread_num();
    if (part < parts) body(count * part / parts, count * (part + 1) / parts);
  }
#endif
}

// Calls body(i) for each i of [0, count), whose costs differ: whoever is free takes the next.
template <typename Body>
void parallel_tasks(int64_t count, int64_t cost, const Body& body) {
  if (Team* const team = led_team(); team != nullptr && team->size() > 1) {
    if (count > 1 && cost >= 2 * kCostPerHelper) return share(*team, count, body);
  } else if (worth_threads(count, cost)) {
#ifdef _OPENMP
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t i = 0; i < count; ++i) body(i);
    return;
#endif
  }
  for (int64_t i = 0; i < count; ++i) body(i);
}

// Memory for what all threads of an operator read: written in one loop, read in the next. Lasts
// until the next call.
inline float* shared_scratch(int64_t count) { return shared_scratch_floats(count); }

}  // namespace airside::cpu::AIRSIDE_ISA
