// simulator [--seed N] [--events M] [--runs K] [--seeds FILE]
//
// Runs K worlds of M events each, from seeds N, N + 1, ...; before them, the seeds that have found
// a mistake in the past. Prints what happened, or the seed and event of the first failure.

#include <chrono>
#include <cstdint>
#include <exception>
#include <fstream>
#include <iostream>
#include <sstream>
#include <string>
#include <string_view>

#include "engine/sim/world.h"

namespace airside::sim {
namespace {

struct Options {
  std::uint64_t seed = 1;
  std::int64_t events = 2000;
  std::int64_t runs = 100;
  std::string seeds_file = AIRSIDE_SEEDS_FILE;
};

bool Parse(int argc, char** argv, Options& options) {
  if (argc % 2 == 0) return false;
  for (int i = 1; i < argc; i += 2) {
    const std::string_view name = argv[i];
    const std::string value = argv[i + 1];
    if (name == "--seed") {
      options.seed = std::stoull(value);
    } else if (name == "--events") {
      options.events = std::stoll(value);
    } else if (name == "--runs") {
      options.runs = std::stoll(value);
    } else if (name == "--seeds") {
      options.seeds_file = value;
    } else {
      return false;
    }
  }
  return true;
}

bool RunWorld(std::uint64_t seed, std::int64_t events, Tally& tally) {
  std::int64_t event = 0;
  try {
    World world(seed, tally);
    for (; event < events; ++event) world.Step();
    world.Drain();
    return true;
  } catch (const std::exception& error) {
    std::cerr << "FAILED: seed " << seed << ", "
              << (event < events ? "event " + std::to_string(event) : std::string("drain"))
              << " of " << events << ": " << error.what() << "\n";
    return false;
  }
}

// Lines of "seed events  # what it found".
bool RunPastFailures(const std::string& path, Tally& tally) {
  std::ifstream file(path);
  if (!file) {
    std::cerr << "cannot read " << path << "\n";
    return false;
  }
  for (std::string line; std::getline(file, line);) {
    std::istringstream fields(line.substr(0, line.find('#')));
    std::uint64_t seed = 0;
    std::int64_t events = 0;
    if (fields >> seed >> events && !RunWorld(seed, events, tally)) return false;
  }
  return true;
}

void Print(const Tally& tally, double elapsed_s) {
  std::cout << tally.events << " events in " << elapsed_s << " s ("
            << static_cast<std::int64_t>(static_cast<double>(tally.events) / elapsed_s)
            << " per second)\n"
            << tally.requests << " requests, " << tally.rejections << " rejected, " << tally.aborts
            << " aborted, " << tally.worker_failures << " worker failures\n"
            << tally.steps << " steps, " << tally.chunks << " chunks, " << tally.tokens
            << " tokens, " << tally.preemptions << " preemptions, " << tally.recomputed_tokens
            << " tokens computed again\n";
  for (const auto& [status, count] : tally.finished) {
    std::cout << "  " << Reason(status) << ": " << count << "\n";
  }
}

int Main(int argc, char** argv) {
  Options options;
  if (!Parse(argc, argv, options)) {
    std::cerr << "usage: simulator [--seed N] [--events M] [--runs K] [--seeds FILE]\n";
    return 2;
  }
  Tally tally;
  const auto start = std::chrono::steady_clock::now();
  if (!RunPastFailures(options.seeds_file, tally)) return 1;
  for (std::int64_t run = 0; run < options.runs; ++run) {
    if (!RunWorld(options.seed + static_cast<std::uint64_t>(run), options.events, tally)) return 1;
  }
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
  Print(tally, elapsed.count());
  return 0;
}

}  // namespace
}  // namespace airside::sim

int main(int argc, char** argv) { return airside::sim::Main(argc, argv); }
