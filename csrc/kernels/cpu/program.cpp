#include "kernels/cpu/program.h"

#include <chrono>
#include <stdexcept>
#include <string>

#include "kernels/cpu/team.h"

namespace airside::cpu {
namespace {

double seconds_now() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(now).count();
}

// Calls body() as the leader of a team.
template <typename Body>
void lead(const Body& body) {
  lead_team([](const void* context) { (*static_cast<const Body*>(context))(); }, &body);
}

}  // namespace

RowCount Program::count_of(int64_t num_rows) const {
  if (num_rows == largest_.num_wanted) return {&StepSize::num_wanted, 1};
  if (num_rows > 0 && num_rows % largest_.num_tokens == 0) {
    return {&StepSize::num_tokens, num_rows / largest_.num_tokens};
  }
  throw std::invalid_argument("an operator over " + std::to_string(num_rows) +
                              " rows cannot be recorded: they are neither tokens nor wanted ones");
}

bool Program::fits(const StepSize& size) const {
  return size.num_tokens <= largest_.num_tokens && size.num_seqs <= largest_.num_seqs &&
         size.num_wanted <= largest_.num_wanted;
}

void Program::run(const StepSize& size) const {
  lead([&] {
    for (const Op& op : ops_) op.run(size);
  });
}

void Program::run_timed(const StepSize& size, double* seconds) const {
  lead([&] {
    for (const Op& op : ops_) {
      const double started = seconds_now();
      op.run(size);
      *seconds++ += seconds_now() - started;
    }
  });
}

std::unique_ptr<Program>& recording() {
  thread_local std::unique_ptr<Program> program;
  return program;
}

}  // namespace airside::cpu
