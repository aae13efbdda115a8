#pragma once

#include <cstdint>
#include <exception>

// The threads that run one program together, each going through all of its operators. An operator
// cuts its work among them (parallel.h) and ends with a meeting.
namespace airside::cpu {

class Team {
 public:
  virtual ~Team() = default;

  virtual int size() const = 0;

  // Returns when all members have called it. They spin, since the work of an operator is cut into
  // equal parts; where other processes have taken a core, they sleep.
  virtual void meet() = 0;

  // The number of the next task, from 0 on; from 0 on again after each meeting.
  virtual int64_t take_task() = 0;

  // Ends the program at the next meeting, for all members; run_team throws `failure`.
  virtual void fail(std::exception_ptr failure) = 0;
  virtual bool has_failed() const = 0;

  // Memory that all members see, 64-byte aligned; what is in it lasts until the next call. All
  // members call this with one count.
  virtual float* scratch(int64_t count) = 0;
};

// This thread's place in a team; `team` is null outside of one.
struct Member {
  Team* team = nullptr;
  int index = 0;
};

Member& this_member();

// Calls body on one thread: the caller's, or a team's first.
template <typename Body>
void run_alone(const Body& body) {
  const Member& member = this_member();
  if (member.team == nullptr) return body();
  try {
    if (member.index == 0) body();
  } catch (...) {
    member.team->fail(std::current_exception());
  }
  member.team->meet();
}

// Calls body(context) on all threads of a new team. Throws what a member gave to `fail`.
void run_team(void (*body)(const void* context), const void* context);

}  // namespace airside::cpu
