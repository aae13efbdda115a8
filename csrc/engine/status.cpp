#include "engine/status.h"

#include <cstddef>

#include "engine/ensure.h"

namespace airside {
namespace {

struct Facts {
  std::string_view name;
  std::string_view reason;
  bool from_waiting;
  bool from_running;
};

// Indexed by the status that is moved to. Nothing leaves a final status.
constexpr std::array<Facts, kNumStatuses> kFacts = {{
    // name                     reason                          from: WAITING  RUNNING
    {"WAITING", "", false, true},
    {"RUNNING", "", true, false},
    {"FINISHED_STOPPED", "stop", true, true},
    {"FINISHED_LENGTH_CAPPED", "length", true, true},
    {"FINISHED_ABORTED", "abort", true, true},
    {"FINISHED_IGNORED", "prompt_length_exceeded", true, false},
    {"FINISHED_PREEMPTED", "insufficient_system_resource", false, true},
    {"FINISHED_VE_FAILED", "vision_failed", true, true},
    {"FINISHED_SO_FAILED", "structured_output_failed", true, true},
}};

const Facts& FactsOf(Status status) { return kFacts[static_cast<std::size_t>(status)]; }

}  // namespace

bool IsFinal(Status status) { return status != Status::kWaiting && status != Status::kRunning; }

bool IsAllowed(Status from, Status to) {
  if (from == Status::kWaiting) return FactsOf(to).from_waiting;
  if (from == Status::kRunning) return FactsOf(to).from_running;
  return false;
}

std::string_view Name(Status status) { return FactsOf(status).name; }

std::string_view Reason(Status status) {
  Ensure(IsFinal(status), "only a final status has a reason");
  return FactsOf(status).reason;
}

void Lifecycle::MoveTo(Status next) {
  Ensure(IsAllowed(status_, next), "a change of status that the table does not allow");
  status_ = next;
}

}  // namespace airside
