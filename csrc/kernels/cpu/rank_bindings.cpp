// What ops.py calls of RankMemory: checks, then the method. A handle is the address of one.

#include <tvm/ffi/tvm_ffi.h>

#include <vector>

#include "kernels/cpu/check.h"
#include "kernels/cpu/program.h"
#include "kernels/cpu/rank_memory.h"

namespace airside::cpu {
namespace {

using tvm::ffi::TensorView;

RankMemory& memory_of(int64_t handle) { return *reinterpret_cast<RankMemory*>(handle); }

// Python is to see a RuntimeError.
template <typename Body>
auto translated(const Body& body) {
  try {
    return body();
  } catch (const std::runtime_error& error) {
    TVM_FFI_THROW(RuntimeError) << error.what();
  }
}

int64_t rank_memory_bytes_bound(int64_t num_ranks) {
  expect_in({"rank_memory", "the number of ranks"}, num_ranks, 1, RankMemory::kRanksMax + 1);
  return RankMemory::num_bytes(num_ranks);
}

int64_t rank_memory_open_bound(int64_t fd, int64_t rank, TensorView processes, double patience_s) {
  const char* op = "rank_memory";
  expect_rank({op, "processes"}, processes, 2);
  const int64_t num_ranks = processes.size(0);
  expect({op, "processes"}, processes, kInt64, {num_ranks, 2});
  expect_in({op, "the number of ranks"}, num_ranks, 1, RankMemory::kRanksMax + 1);
  expect_in({op, "rank"}, rank, 0, num_ranks);
  std::vector<ProcessId> ranks;
  const int64_t* fields = data<const int64_t>(processes);
  for (int64_t i = 0; i < num_ranks; ++i) ranks.push_back({fields[2 * i], fields[2 * i + 1]});
  return translated([&] {
    return reinterpret_cast<int64_t>(
        new RankMemory(static_cast<int>(fd), rank, std::move(ranks), patience_s));
  });
}

void rank_memory_close_bound(int64_t handle) { delete &memory_of(handle); }

// Of what would really exchange what is not there yet.
void expect_no_recording(const char* op) {
  if (recording() != nullptr) TVM_FFI_THROW(RuntimeError) << op << " cannot be recorded";
}

struct AllReduceSum {
  RankMemory* memory;
  const void* x;  // [num_rows, columns]
  void* out;
  int64_t num_rows;
  int64_t columns;
};

void all_reduce_sum(DType dtype, const AllReduceSum& args) {
  args.memory->all_reduce_sum(dtype, args.x, args.out, args.num_rows * args.columns);
}

void all_reduce_sum_bound(TensorView x, int64_t handle, TensorView out) {
  const char* op = "all_reduce_sum";
  expect_rank({op, "x"}, x, 2);
  const DType dtype = activation_dtype({op, "x"}, x);
  expect({op, "x"}, x, x.dtype(), {x.size(0), x.size(1)});
  expect({op, "out"}, out, x.dtype(), {x.size(0), x.size(1)});
  const AllReduceSum args{.memory = &memory_of(handle),
                          .x = data(x),
                          .out = data(out),
                          .num_rows = x.size(0),
                          .columns = x.size(1)};
  translated([&] { submit(op, all_reduce_sum, dtype, args, &AllReduceSum::num_rows); });
}

void gather_columns_bound(TensorView part, int64_t handle, tvm::ffi::Optional<TensorView> out) {
  const char* op = "gather_columns";
  expect_no_recording(op);
  RankMemory& memory = memory_of(handle);
  expect_rank({op, "part"}, part, 2);
  const int64_t rows = part.size(0);
  const int64_t columns = part.size(1);
  const DType dtype = activation_dtype({op, "part"}, part);
  expect({op, "part"}, part, part.dtype(), {rows, columns});
  if (out) expect({op, "out"}, *out, part.dtype(), {rows, columns * memory.num_ranks()});
  if (out.has_value() != (memory.rank() == 0)) {
    TVM_FFI_THROW(ValueError) << op << ": rank 0 and no other has an out";
  }
  translated([&] {
    memory.gather_columns(data(part), out ? data(*out) : nullptr, rows, columns * size_of(dtype));
  });
}

void broadcast_bound(TensorView tokens, int64_t handle) {
  expect_no_recording("broadcast");
  expect_rank({"broadcast", "tokens"}, tokens, 1);
  expect({"broadcast", "tokens"}, tokens, kInt32, {tokens.size(0)});
  translated([&] { memory_of(handle).broadcast(data(tokens), tokens.numel() * 4); });
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(process_start_time, process_start_time);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(rank_memory_bytes, rank_memory_bytes_bound);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(rank_memory_open, rank_memory_open_bound);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(rank_memory_close, rank_memory_close_bound);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(all_reduce_sum, all_reduce_sum_bound);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(gather_columns, gather_columns_bound);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(broadcast, broadcast_bound);

}  // namespace airside::cpu
