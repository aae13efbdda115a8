#pragma once

#include <cstdint>

// The threads of one program run: a leader, which goes through the operators, and helpers, which
// take part of an operator's work where they can.
//
// A leader waits for tasks that helpers have begun, and not for a helper: on a machine whose cores
// others use too, one that has lost its core takes no part. Only at the end are all waited for.
namespace airside::cpu {

class Team {
 public:
  virtual ~Team() = default;

  // The most threads that can be at work.
  virtual int size() const = 0;

  // Calls task(context, i) for each i of [0, count), on this thread and on helpers; returns when
  // all are done. The leader's; tasks may neither share nor throw.
  virtual void share(int64_t count, void (*task)(const void* context, int64_t i),
                     const void* context) = 0;
};

// The team that this thread leads, or null.
Team*& led_team();

// Calls body(context) as the leader of a team of torch's threads, and throws what it throws.
void lead_team(void (*body)(const void* context), const void* context);

}  // namespace airside::cpu
