#pragma once

#include <array>
#include <string_view>

namespace airside {

enum class Status {
  kWaiting,
  kRunning,
  kFinishedStopped,
  kFinishedLengthCapped,
  kFinishedAborted,
  kFinishedIgnored,
  kFinishedPreempted,
  kFinishedVeFailed,
  kFinishedSoFailed,
};

inline constexpr std::array kFinalStatuses = {
    Status::kFinishedStopped,  Status::kFinishedLengthCapped, Status::kFinishedAborted,
    Status::kFinishedIgnored,  Status::kFinishedPreempted,    Status::kFinishedVeFailed,
    Status::kFinishedSoFailed,
};

inline constexpr int kNumStatuses = 2 + static_cast<int>(kFinalStatuses.size());

bool IsFinal(Status status);
bool IsAllowed(Status from, Status to);

// "WAITING", "FINISHED_STOPPED", ...
std::string_view Name(Status status);

// The word that the user sees; for final statuses only.
std::string_view Reason(Status status);

// The status of one sequence. MoveTo is the only way to change it.
class Lifecycle {
 public:
  Status status() const { return status_; }

  // Throws std::logic_error when the table does not allow it.
  void MoveTo(Status next);

 private:
  Status status_ = Status::kWaiting;
};

}  // namespace airside
