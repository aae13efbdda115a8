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
// microseconds, more on a machine whose cores are busy; the members of a team are awake.
inline constexpr int64_t kCostPerThread = 32768;
inline constexpr int64_t kCostPerMember = 2048;

inline bool worth_threads([[maybe_unused]] int64_t count, [[maybe_unused]] int64_t cost) {
#ifdef _OPENMP
  return count > 1 && cost >= 2 * kCostPerThread && omp_get_max_threads() > 1 && !omp_in_parallel();
#else
  return false;
#endif
}

inline int64_t smallest(int64_t a, int64_t b, int64_t c) {
  const int64_t ab = a < b ? a : b;
  return ab < c ? ab : c;
}

// Calls body with this thread's part of [0, count), if it has one.
template <typename Body>
void run_part(int64_t count, int64_t parts, int64_t part, const Body& body) {
  if (part < parts) body(count * part / parts, count * (part + 1) / parts);
}

// Calls body(begin, end) for parts of [0, count), each item of which costs `cost_each`.
template <typename Body>
void parallel_for(int64_t count, int64_t cost_each, const Body& body) {
  if (const Member& member = this_member(); member.team != nullptr) {
    const int64_t wanted = count * cost_each / kCostPerMember;
    const int64_t parts = smallest(wanted, count, member.team->size());
    run_part(count, parts > 1 ? parts : 1, member.index, body);
    return member.team->meet();
  }
  if (!worth_threads(count, count * cost_each)) return body(int64_t{0}, count);
#ifdef _OPENMP
#pragma omp parallel
  {
    const int64_t wanted = count * cost_each / kCostPerThread;
    run_part(count, smallest(wanted, count, omp_get_num_threads()), omp_get_thread_num(), body);
  }
#endif
}

// Calls body(i) for each i of [0, count), whose costs differ: whoever is free takes the next.
template <typename Body>
void parallel_tasks(int64_t count, int64_t cost, const Body& body) {
  if (const Member& member = this_member(); member.team != nullptr) {
    if (cost < 2 * kCostPerMember) {
      for (int64_t i = 0; member.index == 0 && i < count; ++i) body(i);
    } else {
      for (int64_t i = member.team->take_task(); i < count; i = member.team->take_task()) body(i);
    }
    return member.team->meet();
  }
  if (!worth_threads(count, cost)) {
    for (int64_t i = 0; i < count; ++i) body(i);
    return;
  }
#ifdef _OPENMP
#pragma omp parallel for schedule(dynamic, 1)
  for (int64_t i = 0; i < count; ++i) body(i);
#endif
}

// Memory for what all threads of an operator read: written in one loop, read in the next. Lasts
// until the next call.
inline float* shared_scratch(int64_t count) {
  const Member& member = this_member();
  return member.team != nullptr ? member.team->scratch(count) : shared_scratch_floats(count);
}

}  // namespace airside::cpu::AIRSIDE_ISA
