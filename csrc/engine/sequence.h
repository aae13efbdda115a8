#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "engine/config.h"
#include "engine/request.h"
#include "engine/status.h"
#include "engine/types.h"

namespace airside {

// One picture of a prompt. Its tokens are known before its pixels are.
struct Image {
  enum class State { kShapeUnknown, kPixelsPending, kReady };

  State state = State::kShapeUnknown;
  std::vector<TokenId> expansion;  // takes the place of the mark; empty again once it has
  // The picture's tokens in the prompt are [begin, end): the mark at first, then the expansion.
  std::int32_t begin = 0;
  std::int32_t end = 0;
};

// One request, from the day it is taken in until it has ended.
//
//   tokens:  | prompt (expanded)              | output           |
//            0      num_computed       ready                Length()
//            |--KV--|------- may be computed --|
struct Sequence {
  struct RequestGroup {  // never changes
    SeqId id{};
    std::string name;
    ClientId client{};
    Seconds arrival = 0;
    std::int32_t priority = 0;
    std::optional<Seconds> deadline;
    std::uint64_t serial = 0;  // counts the requests taken in; decides between equals
  };
  struct Input {
    std::vector<TokenId> prompt;
    std::vector<Image> images;
  };
  struct Cache {                  // what recompute replaces whole
    std::vector<BlockId> blocks;  // exactly as many as num_computed and the tokens in flight need
    std::int32_t num_computed = 0;
  };
  struct Generation {
    std::int64_t tokens_max = 0;  // of output, as far as the request says
    std::int64_t tokens_min = 0;
    std::vector<TokenId> stop_token_ids;
    Sampling sampling;
  };
  struct Schedule {
    Lifecycle lifecycle;
    std::int32_t num_in_flight = 0;     // tokens of the step that is being computed; 0: not in it
    std::int32_t num_computed_max = 0;  // tokens before this have been computed at least once
  };
  struct Output {
    std::vector<TokenId> tokens;
    std::optional<Seconds> first_scheduled;
    std::optional<Seconds> first_token;
    std::int32_t num_preemptions = 0;
  };

  RequestGroup request;
  Input input;
  Cache cache;
  Generation generation;
  Schedule schedule;
  Output output;

  Status status() const { return schedule.lifecycle.status(); }
  std::int32_t Length() const {
    return static_cast<std::int32_t>(input.prompt.size() + output.tokens.size());
  }

  bool ShapesKnown() const;

  // Tokens [0, ReadyLength()) may be computed.
  std::int32_t ReadyLength() const;
  bool Schedulable() const { return cache.num_computed < ReadyLength(); }

  // Has made tokens, and only the last of them is left to compute.
  bool Decoding() const { return !output.tokens.empty() && cache.num_computed == Length() - 1; }

  // Tokens of the prompt that came from expansions.
  std::int32_t NumImageTokens() const;

  // Appends tokens [begin, end) of prompt and output to `to`.
  void AppendTokens(std::int32_t begin, std::int32_t end, std::vector<TokenId>& to) const;
};

Sequence MakeSequence(Request request, std::uint64_t serial);

// Puts every expansion in the place of its mark; all shapes must be known.
void ExpandPrompt(Sequence::Input& input);

// Whether `a` comes before `b`: priority, deadline (none is last), arrival, order of adding.
bool ComesBefore(const Sequence& a, const Sequence& b);

struct InOrder {
  bool operator()(const Sequence* a, const Sequence* b) const { return ComesBefore(*a, *b); }
};

}  // namespace airside
