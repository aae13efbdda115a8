#pragma once

#include <array>
#include <cstdint>
#include <iosfwd>
#include <map>

#include "engine/config.h"
#include "engine/request.h"
#include "engine/status.h"

namespace airside::sim {

// What happened, over all worlds.
struct Tally {
  std::int64_t events = 0;
  std::int64_t requests = 0;
  std::int64_t aborts = 0;
  std::int64_t client_stops = 0;
  std::int64_t worker_failures = 0;
  std::int64_t steps = 0;
  std::int64_t overlapped_steps = 0;  // planned while another was in flight
  std::int64_t rows = 0;
  std::int64_t chunks = 0;          // rows that did not reach the end of their sequence
  std::int64_t discarded_rows = 0;  // that came back to nobody
  std::int64_t tokens = 0;
  std::int64_t forced_tokens = 0;  // asked for by plans
  std::int64_t records = 0;        // of tokens' log-probabilities, and chunks of a prompt's
  std::int64_t recomputed_tokens = 0;
  std::int64_t cached_tokens = 0;  // not computed, since the cache had them
  std::int64_t states_from_blocks = 0;
  std::int64_t shifted_rows = 0;  // behind a picture of fewer positions than tokens
  std::int64_t draft_tokens = 0;
  std::int64_t accepted_tokens = 0;
  std::int32_t overtaken_max = 0;
  std::map<VictimRule, std::int64_t> preemptions;
  std::array<std::int64_t, 8> draft_lengths = {};  // rows by drafts; the last: that many or more
  std::map<Status, std::int64_t> finished;
  std::map<RejectionCode, std::int64_t> rejections;

  void Add(const Tally& other);
  void Print(std::ostream& out, double elapsed_s) const;
};

}  // namespace airside::sim
