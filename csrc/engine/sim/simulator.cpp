// simulator [--seed N] [--events M] [--runs K] [--threads T] [--seeds FILE]
//
// Compares the engine's leaf classes with plain ones, and runs K worlds of M events each, from
// seeds N, N + 1, ..., T of them at a time; before them, the seeds that have found a mistake in the
// past. Prints what happened, or the seed and event of the first failure.
//
// simulator --compare-victims
//
// Runs one load with each victim rule, with and without prefix cache, and prints a table.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <fstream>
#include <iostream>
#include <mutex>
#include <sstream>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "engine/sim/leaf_checks.h"
#include "engine/sim/victim_comparison.h"
#include "engine/sim/world.h"

namespace airside::sim {
namespace {

struct Options {
  std::uint64_t seed = 1;
  std::int64_t events = 2000;
  std::int64_t runs = 500;
  std::int64_t threads = std::max(1U, std::thread::hardware_concurrency());
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
    } else if (name == "--threads") {
      options.threads = std::stoll(value);
    } else if (name == "--seeds") {
      options.seeds_file = value;
    } else {
      return false;
    }
  }
  return true;
}

struct Run {
  std::uint64_t seed = 0;
  std::int64_t events = 0;
};

// What went wrong; "": nothing.
std::string RunWorld(const Run& run, Tally& tally) {
  std::int64_t event = 0;
  try {
    World world(run.seed, tally);
    for (; event < run.events; ++event) world.Step();
    world.Drain();
    return "";
  } catch (const std::exception& error) {
    return "FAILED: seed " + std::to_string(run.seed) + ", " +
           (event < run.events ? "event " + std::to_string(event) : std::string("drain")) + " of " +
           std::to_string(run.events) + ": " + error.what();
  }
}

// Lines of "seed events  # what it found". False: there is no such file.
bool ReadPastFailures(const std::string& path, std::vector<Run>& runs) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    std::istringstream fields(line.substr(0, line.find('#')));
    Run run;
    if (fields >> run.seed >> run.events) runs.push_back(run);
  }
  return file.eof();
}

// Many worlds at once, each of which is the same whatever runs beside it.
class Crowd {
 public:
  explicit Crowd(std::vector<Run> runs) : runs_(std::move(runs)) {}

  // Whether all went well. Stops at the first failure.
  bool Simulate(std::int64_t num_threads) {
    std::vector<std::thread> threads;
    for (std::int64_t i = 0; i < num_threads; ++i) threads.emplace_back([this] { Work(); });
    for (std::thread& thread : threads) thread.join();
    return !failed_;
  }

  const Tally& tally() const { return tally_; }

 private:
  void Work() {
    Tally tally;
    for (std::size_t next = next_++; next < runs_.size() && !failed_; next = next_++) {
      const std::string failure = RunWorld(runs_[next], tally);
      if (failure.empty()) continue;
      failed_ = true;
      const std::scoped_lock lock(mutex_);
      std::cerr << failure << "\n";
    }
    const std::scoped_lock lock(mutex_);
    tally_.Add(tally);
  }

  const std::vector<Run> runs_;
  std::atomic<std::size_t> next_ = 0;
  std::atomic<bool> failed_ = false;
  std::mutex mutex_;
  Tally tally_;
};

int Main(int argc, char** argv) {
  if (argc == 2 && std::string_view(argv[1]) == "--compare-victims") {
    CompareVictims(std::cout);
    return 0;
  }
  Options options;
  if (!Parse(argc, argv, options)) {
    std::cerr
        << "usage: simulator [--seed N] [--events M] [--runs K] [--threads T] [--seeds FILE]\n"
           "       simulator --compare-victims\n";
    return 2;
  }
  std::vector<Run> runs;
  if (!ReadPastFailures(options.seeds_file, runs)) {
    std::cerr << "cannot read " << options.seeds_file << "\n";
    return 1;
  }
  for (std::int64_t i = 0; i < options.runs; ++i) {
    runs.push_back({options.seed + static_cast<std::uint64_t>(i), options.events});
  }
  try {
    CheckLeaves(options.seed);
  } catch (const std::exception& error) {
    std::cerr << "FAILED: leaves, seed " << options.seed << ": " << error.what() << "\n";
    return 1;
  }
  Crowd crowd(std::move(runs));
  const auto start = std::chrono::steady_clock::now();
  const bool went_well = crowd.Simulate(options.threads);
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
  if (went_well) crowd.tally().Print(std::cout, elapsed.count());
  return went_well ? 0 : 1;
}

}  // namespace
}  // namespace airside::sim

int main(int argc, char** argv) { return airside::sim::Main(argc, argv); }
