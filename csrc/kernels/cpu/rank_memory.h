#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "kernels/cpu/types.h"

// How the ranks of one node exchange tensors: through memory that all of them have mapped.
namespace airside::cpu {

// A rank that was waited for is gone, or did not come in time; the message names it.
struct PeerLost : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Tells a process from a later one with the same pid.
struct ProcessId {
  int64_t pid;
  int64_t start_time;  // as `process_start_time` gives it
};

// In clock ticks since the system's start; 0 where no such process is seen, or only its remains.
int64_t process_start_time(int64_t pid);

// One rank's end of the shared memory. All ranks call the same methods in the same order with the
// same sizes, each from one thread at a time.
//
//   | header 0 | header 1 | ... | slots of rank 0: even, odd | slots of rank 1: even, odd | ...
//
// Everything happens in rounds, which are counted. In a round a rank may write its slot of the
// round's parity, then says so (`published`), and reads the slots of others that have said so. It
// starts round n when all ranks have published round n - 1, and so have read what round n - 2 left
// in the slots that it overwrites.
class RankMemory {
 public:
  static constexpr int64_t kRanksMax = 64;
  static constexpr int64_t kSlotBytes = 256 * 1024;  // longer tensors go in pieces

  // What `fd` must have room for.
  static int64_t num_bytes(int64_t num_ranks);

  // Maps the memory, which reads as zeros before the first rank's first round. `fd` may be closed
  // afterwards.
  //
  // Args:
  //   ranks: all ranks' processes, in order.
  //   patience_s: how long a rank that lives is waited for.
  // Throws std::runtime_error: it cannot be mapped.
  RankMemory(int fd, int64_t rank, std::vector<ProcessId> ranks, double patience_s);
  ~RankMemory();  // whoever waits for this rank from now on gets PeerLost
  RankMemory(const RankMemory&) = delete;
  RankMemory& operator=(const RankMemory&) = delete;

  int64_t num_ranks() const { return static_cast<int64_t>(ranks_.size()); }
  int64_t rank() const { return rank_; }

  // The methods below throw PeerLost; the memory is of no use to any rank then.

  // out[i] = round(x[i] of rank 0 + of rank 1 + ...), the sum in float32 and in that order, on
  // every rank. `out` may be `x`.
  void all_reduce_sum(DType dtype, const void* x, void* out, int64_t count);

  // On rank 0: out[row] = the ranks' rows side by side. Others leave `out` alone.
  //
  // Args:
  //   part: [num_rows, row_bytes].
  //   out: [num_rows, num_ranks * row_bytes].
  void gather_columns(const void* part, void* out, int64_t num_rows, int64_t row_bytes);

  // Rank 0's bytes, on every rank.
  void broadcast(void* bytes, int64_t num_bytes);

 private:
  // On cache lines of its own: others spin on it.
  struct alignas(128) Header {
    std::atomic<uint32_t> published;  // the last round; wraps around
    std::atomic<uint32_t> sleepers;   // ranks to be woken after the next
    std::atomic<uint32_t> has_left;
  };

  Header& header(int64_t rank) const;
  std::byte* slot(int64_t rank) const;  // of the round
  void begin_round();
  void publish();
  void wait_for(int64_t rank);
  void wait_for_all();
  void wait_long(int64_t rank);
  void expect_alive(int64_t rank) const;
  void sum_directly(DType dtype, const std::byte* x, std::byte* out, int64_t count);
  void sum_in_shares(DType dtype, const std::byte* x, std::byte* out, int64_t count);
  void sum_slots(DType dtype, const std::byte* own, std::byte* out, int64_t begin, int64_t end);

  const int64_t rank_;
  const std::vector<ProcessId> ranks_;
  const double patience_s_;
  std::byte* memory_;
  uint32_t round_ = 0;
};

}  // namespace airside::cpu
