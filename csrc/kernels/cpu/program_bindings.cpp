// What ops.py calls of a Program. A handle is the address of one.

#include <tvm/ffi/tvm_ffi.h>

#include <memory>

#include "kernels/cpu/program.h"

namespace airside::cpu {
namespace {

void begin_recording(int64_t num_tokens, int64_t num_seqs, int64_t num_wanted) {
  if (num_tokens < 1 || num_seqs < 1 || num_wanted <= num_tokens) {
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

void run_program(int64_t program, int64_t num_tokens, int64_t num_seqs, int64_t num_wanted) {
  const auto& recorded = *reinterpret_cast<const Program*>(program);
  const StepSize size{num_tokens, num_seqs, num_wanted};
  if (!recorded.fits(size)) {
    TVM_FFI_THROW(ValueError) << "a step of " << num_tokens << " tokens of " << num_seqs
                              << " sequences, " << num_wanted
                              << " of them wanted, is larger than the one recorded";
  }
  recorded.run(size);
}

int64_t count_ops(int64_t program) { return reinterpret_cast<const Program*>(program)->num_ops(); }

void free_program(int64_t program) { delete reinterpret_cast<const Program*>(program); }

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(begin_recording, begin_recording);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(drop_recording, drop_recording);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(end_recording, end_recording);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(run_program, run_program);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(count_ops, count_ops);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(free_program, free_program);

}  // namespace airside::cpu
