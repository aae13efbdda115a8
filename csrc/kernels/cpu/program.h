#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "kernels/cpu/types.h"

// A model's step as a list of operators: recorded once, run in one call for any number of rows.
//
// While a program is recorded, the operators that bindings.cpp is asked for are not computed but
// noted down with their arguments, which are memory that stays where it is. The tensors of the
// recording have as many rows as any step will; a step fills in the first ones, so that only the
// number of rows changes from step to step.
namespace airside::cpu {

// What differs between steps.
struct StepSize {
  int64_t num_tokens;
  int64_t num_seqs;
  int64_t num_wanted;  // tokens whose final states are read
};

// How many rows of an operator there are in a step: `factor` for each of one of its counts.
struct RowCount {
  int64_t StepSize::* of;
  int64_t factor;

  int64_t in(const StepSize& size) const { return size.*of * factor; }
};

class Program {
 public:
  // `largest`: of any step, and of the tensors that it is recorded with. No multiple of num_tokens
  // may be num_wanted: that is how one tells rows that are tokens from rows that are wanted ones.
  explicit Program(StepSize largest) : largest_(largest) {}

  // Throws std::invalid_argument for a number of rows that is neither.
  RowCount count_of(int64_t num_rows) const;

  // `name`: the operator's, with static lifetime.
  void add(const char* name, std::function<void(const StepSize&)> run) {
    ops_.push_back({name, std::move(run)});
  }

  bool fits(const StepSize& size) const;

  // For a size that fits. Throws what an operator does, which no other than those over the ranks
  // do.
  void run(const StepSize& size) const;

  // The same, and adds to seconds[i] how long operator i took.
  void run_timed(const StepSize& size, double* seconds) const;

  const char* name(int64_t op) const { return ops_[op].name; }

  int64_t num_ops() const { return static_cast<int64_t>(ops_.size()); }

 private:
  StepSize largest_;
  struct Op {
    const char* name;
    std::function<void(const StepSize&)> run;
  };

  std::vector<Op> ops_;
};

// The program that this thread records, or null.
std::unique_ptr<Program>& recording();

// Computes now, or notes down for later. `op`: the operator's name, with static lifetime; `rows`:
// the member of Args that counts rows.
template <typename Args>
void submit(const char* op, void (*kernel)(DType, const Args&), DType dtype, const Args& args,
            int64_t Args::* rows, RowCount count) {
  recording()->add(op, [=](const StepSize& size) {
    Args now = args;
    now.*rows = count.in(size);
    kernel(dtype, now);
  });
}

template <typename Args>
void submit(const char* op, void (*kernel)(DType, const Args&), DType dtype, const Args& args,
            int64_t Args::* rows) {
  if (recording() == nullptr) return kernel(dtype, args);
  submit(op, kernel, dtype, args, rows, recording()->count_of(args.*rows));
}

}  // namespace airside::cpu
