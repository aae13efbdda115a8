#include "kernels/cpu/program.h"

#include <stdexcept>
#include <string>

#include "kernels/cpu/team.h"

namespace airside::cpu {
namespace {

struct Run {
  const std::vector<std::function<void(const StepSize&)>>& ops;
  const StepSize& size;
};

void run_all(const void* context) {
  const auto& [ops, size] = *static_cast<const Run*>(context);
  for (const auto& op : ops) op(size);
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
  const Run run{ops_, size};
  lead_team(run_all, &run);
}

std::unique_ptr<Program>& recording() {
  thread_local std::unique_ptr<Program> program;
  return program;
}

}  // namespace airside::cpu
