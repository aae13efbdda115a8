#include "kernels/cpu/rank_memory.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

#include "kernels/cpu/kernels.h"

namespace airside::cpu {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;

// Ranks that compute side by side are rarely further apart than the first. A rank that has been
// waited for as long as the second is busy with other things; to sleep then leaves the core to
// those that have work, and costs the few microseconds of a wake-up.
constexpr microseconds kSpin{50};
constexpr microseconds kYield{200};
constexpr microseconds kSleep{20'000};  // between two looks at whether the peer lives
constexpr int kPausesPerLook = 32;      // at the clock

// From this size on, with more than two ranks, each sums a share and reads the others' sums:
// another round, but 2 (n - 1) / n of a tensor from the other cores instead of n - 1.
constexpr int64_t kShareBytes = 32 * 1024;

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Whether a rank at round `published` has published `round`; the count wraps around.
bool has_reached(uint32_t published, uint32_t round) {
  return static_cast<int32_t>(published - round) >= 0;
}

// Returns when woken, when `word` is no longer `seen`, after kSleep, or for no reason.
void sleep_on([[maybe_unused]] std::atomic<uint32_t>& word, [[maybe_unused]] uint32_t seen) {
  timespec limit{.tv_sec = 0, .tv_nsec = kSleep.count() * 1000};
#if defined(__linux__)
  syscall(SYS_futex, &word, FUTEX_WAIT, seen, &limit, nullptr, 0);
#else
  limit.tv_nsec = 100'000;
  nanosleep(&limit, nullptr);
#endif
}

void wake_all([[maybe_unused]] std::atomic<uint32_t>& word) {
#if defined(__linux__)
  syscall(SYS_futex, &word, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
#endif
}

std::string read_start(const std::string& path) {
  std::array<char, 1024> text;
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return "";
  const ssize_t length = read(fd, text.data(), text.size());
  close(fd);
  return length > 0 ? std::string(text.data(), static_cast<size_t>(length)) : "";
}

}  // namespace

int64_t process_start_time(int64_t pid) {
  const std::string stat = read_start("/proc/" + std::to_string(pid) + "/stat");
  const size_t name_end = stat.rfind(')');  // the name may hold spaces; the state, field 3, follows
  if (name_end == std::string::npos || name_end + 2 >= stat.size()) return 0;
  std::string_view fields = std::string_view(stat).substr(name_end + 2);
  if (fields.front() == 'Z' || fields.front() == 'X') return 0;
  for (int field = 3; field < 22; ++field) {
    const size_t space = fields.find(' ');
    if (space == std::string_view::npos) return 0;
    fields.remove_prefix(space + 1);
  }
  return std::strtoll(std::string(fields).c_str(), nullptr, 10);
}

int64_t RankMemory::num_bytes(int64_t num_ranks) {
  return num_ranks * (static_cast<int64_t>(sizeof(Header)) + 2 * kSlotBytes);
}

RankMemory::RankMemory(int fd, int64_t rank, std::vector<ProcessId> ranks, double patience_s)
    : rank_(rank), ranks_(std::move(ranks)), patience_s_(patience_s) {
  static_assert(std::atomic<uint32_t>::is_always_lock_free);
  const size_t size = static_cast<size_t>(num_bytes(num_ranks()));
  void* mapped = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (mapped == MAP_FAILED) {
    throw std::runtime_error(std::string("the ranks' memory cannot be mapped: ") +
                             std::strerror(errno));
  }
  memory_ = static_cast<std::byte*>(mapped);
}

RankMemory::~RankMemory() {
  Header& own = header(rank_);
  own.has_left.store(1);
  wake_all(own.published);
  munmap(memory_, static_cast<size_t>(num_bytes(num_ranks())));
}

void RankMemory::all_reduce_sum(DType dtype, const void* x, void* out, int64_t count) {
  const int64_t item = size_of(dtype);
  const int64_t piece = kSlotBytes / item;
  for (int64_t begin = 0; begin < count; begin += piece) {
    const int64_t length = std::min(piece, count - begin);
    const std::byte* from = static_cast<const std::byte*>(x) + begin * item;
    std::byte* to = static_cast<std::byte*>(out) + begin * item;
    if (num_ranks() > 2 && length * item >= kShareBytes) {
      sum_in_shares(dtype, from, to, length);
    } else {
      sum_directly(dtype, from, to, length);
    }
  }
}

void RankMemory::gather_columns(const void* part, void* out, int64_t num_rows, int64_t row_bytes) {
  const int64_t total = num_rows * row_bytes;
  const auto place = [&](int64_t rank, const std::byte* bytes, int64_t begin, int64_t end) {
    while (begin < end) {
      const int64_t column = begin % row_bytes;
      const int64_t length = std::min(row_bytes - column, end - begin);
      const int64_t row_begin = begin / row_bytes * num_ranks() * row_bytes;
      std::memcpy(static_cast<std::byte*>(out) + row_begin + rank * row_bytes + column, bytes,
                  static_cast<size_t>(length));
      begin += length;
      bytes += length;
    }
  };
  for (int64_t begin = 0; begin < total; begin += kSlotBytes) {
    const int64_t end = std::min(begin + kSlotBytes, total);
    const std::byte* own = static_cast<const std::byte*>(part) + begin;
    begin_round();
    if (rank_ != 0) std::memcpy(slot(rank_), own, static_cast<size_t>(end - begin));
    publish();
    if (rank_ != 0) continue;
    place(0, own, begin, end);
    for (int64_t peer = 1; peer < num_ranks(); ++peer) {
      wait_for(peer);
      place(peer, slot(peer), begin, end);
    }
  }
}

void RankMemory::broadcast(void* bytes, int64_t num_bytes) {
  for (int64_t begin = 0; begin < num_bytes; begin += kSlotBytes) {
    const size_t length = static_cast<size_t>(std::min(kSlotBytes, num_bytes - begin));
    std::byte* own = static_cast<std::byte*>(bytes) + begin;
    begin_round();
    if (rank_ == 0) std::memcpy(slot(0), own, length);
    publish();
    if (rank_ == 0) continue;
    wait_for(0);
    std::memcpy(own, slot(0), length);
  }
}

RankMemory::Header& RankMemory::header(int64_t rank) const {
  return *reinterpret_cast<Header*>(memory_ + rank * static_cast<int64_t>(sizeof(Header)));
}

std::byte* RankMemory::slot(int64_t rank) const {
  const int64_t headers = num_ranks() * static_cast<int64_t>(sizeof(Header));
  return memory_ + headers + (2 * rank + round_ % 2) * kSlotBytes;
}

void RankMemory::begin_round() {
  wait_for_all();
  ++round_;
}

void RankMemory::publish() {
  Header& own = header(rank_);
  // Sequentially consistent, as what `wait_long` does is: either this sees the sleeper, or the
  // sleeper sees the round.
  own.published.store(round_);
  if (own.sleepers.load() != 0) wake_all(own.published);
}

void RankMemory::wait_for(int64_t rank) {
  const std::atomic<uint32_t>& published = header(rank).published;
  for (int i = 0; i < kPausesPerLook; ++i) {
    if (has_reached(published.load(std::memory_order_acquire), round_)) return;
    pause();
  }
  wait_long(rank);
}

void RankMemory::wait_for_all() {
  for (int64_t rank = 0; rank < num_ranks(); ++rank) wait_for(rank);
}

void RankMemory::wait_long(int64_t rank) {
  Header& peer = header(rank);
  const Clock::time_point begin = Clock::now();
  while (true) {
    for (int i = 0; i < kPausesPerLook; ++i) {
      if (has_reached(peer.published.load(std::memory_order_acquire), round_)) return;
      pause();
    }
    const Clock::duration waited = Clock::now() - begin;
    if (waited < kSpin) continue;
    if (waited < kYield) {
      sched_yield();
      continue;
    }
    if (waited > kSleep) expect_alive(rank);
    if (waited > std::chrono::duration<double>(patience_s_)) {
      std::ostringstream why;
      why << "rank " << rank << " has not answered rank " << rank_ << " for " << patience_s_
          << " s";
      throw PeerLost(why.str());
    }
    peer.sleepers.fetch_add(1);
    const uint32_t seen = peer.published.load();
    if (!has_reached(seen, round_) && peer.has_left.load() == 0) sleep_on(peer.published, seen);
    peer.sleepers.fetch_sub(1);
  }
}

// What a rank has published before its end counts: this is asked after a look at it.
void RankMemory::expect_alive(int64_t rank) const {
  const ProcessId& process = ranks_[static_cast<size_t>(rank)];
  const bool has_left = header(rank).has_left.load() != 0;
  if (!has_left && process_start_time(process.pid) == process.start_time) return;
  if (has_reached(header(rank).published.load(), round_)) return;
  throw PeerLost("rank " + std::to_string(rank) + " (pid " + std::to_string(process.pid) +
                 (has_left ? ") has left the group" : ") is gone"));
}

void RankMemory::sum_directly(DType dtype, const std::byte* x, std::byte* out, int64_t count) {
  begin_round();
  std::memcpy(slot(rank_), x, static_cast<size_t>(count * size_of(dtype)));
  publish();
  wait_for_all();
  sum_slots(dtype, x, out, 0, count);
}

void RankMemory::sum_in_shares(DType dtype, const std::byte* x, std::byte* out, int64_t count) {
  const int64_t item = size_of(dtype);
  // Whole cache lines, so that no two ranks write to one.
  const int64_t share = (count + num_ranks() - 1) / num_ranks() * item;
  const int64_t share_bytes = (share + 63) / 64 * 64;
  const auto begin_of = [&](int64_t rank) { return std::min(rank * share_bytes, count * item); };
  begin_round();
  std::memcpy(slot(rank_), x, static_cast<size_t>(count * item));
  publish();
  wait_for_all();
  const int64_t own = begin_of(rank_);
  sum_slots(dtype, x, out, own / item, begin_of(rank_ + 1) / item);
  begin_round();
  std::memcpy(slot(rank_) + own, out + own, static_cast<size_t>(begin_of(rank_ + 1) - own));
  publish();
  for (int64_t peer = 0; peer < num_ranks(); ++peer) {
    if (peer == rank_) continue;
    const int64_t begin = begin_of(peer);
    wait_for(peer);
    std::memcpy(out + begin, slot(peer) + begin, static_cast<size_t>(begin_of(peer + 1) - begin));
  }
}

// The sums of elements [begin, end) of this round's slots; `own` is what this rank put in its slot.
void RankMemory::sum_slots(DType dtype, const std::byte* own, std::byte* out, int64_t begin,
                           int64_t end) {
  const int64_t offset = begin * size_of(dtype);
  const void* parts[kRanksMax];
  for (int64_t rank = 0; rank < num_ranks(); ++rank) {
    parts[rank] = (rank == rank_ ? own : slot(rank)) + offset;
  }
  kernels().sum_parts(
      dtype, {.parts = parts, .out = out + offset, .num_parts = num_ranks(), .count = end - begin});
}

}  // namespace airside::cpu
