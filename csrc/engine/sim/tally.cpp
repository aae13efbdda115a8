#include "engine/sim/tally.h"

#include <algorithm>
#include <cstddef>
#include <ostream>

namespace airside::sim {

void Tally::Add(const Tally& other) {
  for (const auto count : {&Tally::events, &Tally::requests, &Tally::aborts, &Tally::client_stops,
                           &Tally::worker_failures, &Tally::steps, &Tally::overlapped_steps,
                           &Tally::rows, &Tally::chunks, &Tally::discarded_rows, &Tally::tokens,
                           &Tally::forced_tokens, &Tally::records, &Tally::recomputed_tokens,
                           &Tally::cached_tokens, &Tally::states_from_blocks, &Tally::shifted_rows,
                           &Tally::draft_tokens, &Tally::accepted_tokens}) {
    this->*count += other.*count;
  }
  overtaken_max = std::max(overtaken_max, other.overtaken_max);
  for (const auto& [rule, count] : other.preemptions) preemptions[rule] += count;
  for (std::size_t i = 0; i < draft_lengths.size(); ++i) draft_lengths[i] += other.draft_lengths[i];
  for (const auto& [status, count] : other.finished) finished[status] += count;
  for (const auto& [code, count] : other.rejections) rejections[code] += count;
}

void Tally::Print(std::ostream& out, double elapsed_s) const {
  out << events << " events in " << elapsed_s << " s ("
      << static_cast<std::int64_t>(static_cast<double>(events) / elapsed_s) << " per second)\n"
      << requests << " requests, " << aborts << " aborted, " << client_stops
      << " stopped by clients, " << worker_failures << " worker failures\n"
      << steps << " steps, " << overlapped_steps << " overlapped; " << rows << " rows, " << chunks
      << " chunks, " << discarded_rows << " discarded, " << shifted_rows << " shifted\n"
      << tokens << " tokens, " << forced_tokens << " forced, " << records << " records\n"
      << cached_tokens << " tokens from the cache, " << states_from_blocks
      << " states from blocks, " << recomputed_tokens << " tokens computed again\n"
      << "preemptions:";
  for (const auto& [rule, count] : preemptions) out << " " << Name(rule) << " " << count;
  out << "\ndrafts: " << draft_tokens << " verified, " << accepted_tokens << " accepted; rows of";
  for (std::size_t i = 0; i < draft_lengths.size(); ++i) {
    out << " " << i << (i + 1 == draft_lengths.size() ? "+" : "") << ":" << draft_lengths[i];
  }
  out << "\novertaken at most " << overtaken_max << " times\n";
  for (const auto& [status, count] : finished) {
    out << "  " << Reason(status) << ": " << count << "\n";
  }
  for (const auto& [code, count] : rejections) {
    out << "  rejected, " << Name(code) << ": " << count << "\n";
  }
}

}  // namespace airside::sim
