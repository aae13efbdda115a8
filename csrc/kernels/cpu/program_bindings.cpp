// What ops.py calls of a Program. A handle is the address of one.

#include <tvm/ffi/tvm_ffi.h>

#include <memory>
#include <string>

#include "kernels/cpu/check.h"
#include "kernels/cpu/program.h"

namespace airside::cpu {
namespace {

using tvm::ffi::TensorView;

void begin_recording(int64_t num_tokens, int64_t num_seqs, int64_t num_wanted) {
  if (num_tokens < 1 || num_seqs < 1 || num_wanted <= num_tokens || num_wanted % num_tokens == 0) {
    TVM_FFI_THROW(ValueError) << "no step has " << num_tokens << " tokens of " << num_seqs
                              << " sequences, recorded with " << num_wanted << " wanted rows";
  }
  recording() = std::make_unique<Program>(StepSize{num_tokens, num_seqs, num_wanted});
}

void drop_recording() { recording().reset(); }

// What was recorded, to be freed by the caller.
int64_t end_recording() {
  if (recording() == nullptr) TVM_FFI_THROW(RuntimeError) << "no program is being recorded";
  return reinterpret_cast<int64_t>(recording().release());
}

// The program, for a step that fits it.
const Program& program_for(int64_t handle, const StepSize& size) {
  const auto& program = *reinterpret_cast<const Program*>(handle);
  if (!program.fits(size)) {
    TVM_FFI_THROW(ValueError) << "a step of " << size.num_tokens << " tokens of " << size.num_seqs
                              << " sequences, " << size.num_wanted
                              << " of them wanted, is larger than the one recorded";
  }
  return program;
}

void run_program(int64_t program, int64_t num_tokens, int64_t num_seqs, int64_t num_wanted) {
  const StepSize size{num_tokens, num_seqs, num_wanted};
  program_for(program, size).run(size);
}

void time_program(int64_t program, int64_t num_tokens, int64_t num_seqs, int64_t num_wanted,
                  TensorView seconds) {
  const StepSize size{num_tokens, num_seqs, num_wanted};
  const Program& timed = program_for(program, size);
  expect({"time_program", "seconds"}, seconds, kFloat64, {timed.num_ops()});
  timed.run_timed(size, data<double>(seconds));
}

std::string op_name(int64_t program, int64_t op) {
  const auto& named = *reinterpret_cast<const Program*>(program);
  expect_in({"op_name", "op"}, op, 0, named.num_ops());
  return named.name(op);
}

int64_t count_ops(int64_t program) { return reinterpret_cast<const Program*>(program)->num_ops(); }

void free_program(int64_t program) { delete reinterpret_cast<const Program*>(program); }

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(begin_recording, begin_recording);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(drop_recording, drop_recording);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(end_recording, end_recording);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(run_program, run_program);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(time_program, time_program);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(op_name, op_name);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(count_ops, count_ops);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(free_program, free_program);

}  // namespace airside::cpu
