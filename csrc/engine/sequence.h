#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "engine/block_key.h"
#include "engine/config.h"
#include "engine/fair_shares.h"
#include "engine/image.h"
#include "engine/ngram_index.h"
#include "engine/request.h"
#include "engine/status.h"
#include "engine/types.h"

namespace airside {

// One request, from the day it is taken in until it has ended.
//
//   tokens:  | prompt (expanded)              | output       | pending |
//            0      num_computed      NumPlanned()           Length()  VirtualLength()
//            |--KV--|-- in flight -----|----- still to plan -----------|
//
// A pending token is being sampled by a step in flight. It counts, but nobody knows it yet.
struct Sequence {
  struct RequestGroup {  // never changes
    SeqId id{};
    std::string name;
    ClientId client{};
    std::string user;
    Seconds arrival = 0;
    std::int32_t priority = 0;
    std::optional<Seconds> deadline;
    std::uint64_t serial = 0;  // counts the requests taken in; decides between equals
  };
  struct Input {
    std::vector<TokenId> prompt;
    std::vector<Image> images;
    std::string salt;
    std::int32_t logprobs = -1;                // of the prompt; as in the request
    std::optional<TokenId> atomic_token = {};  // runs of it in an image are computed in one step
  };
  struct Cache {                  // what recompute replaces whole
    std::vector<BlockId> blocks;  // exactly as many as NumPlanned() tokens need
    std::int32_t num_computed = 0;
    std::int32_t num_in_flight = 0;  // tokens of the steps that are being computed
    std::int32_t num_published = 0;  // blocks, from the first, whose key was told or shared
    std::int32_t state_slot = -1;    // -1: none; held exactly as long as blocks are
    std::uint64_t epoch = 0;         // counts the replacements: rows of an older one are void
  };
  struct Generation {
    std::int64_t tokens_max = 0;  // of output, as far as the request says
    std::int64_t tokens_min = 0;
    std::int64_t length_max = 0;  // of prompt and output together
    std::vector<TokenId> stop_token_ids;
    Sampling sampling;
    LogitRules logit_rules;
    std::int32_t logprobs = -1;
  };
  struct Schedule {
    Lifecycle lifecycle;
    std::optional<std::int64_t> turn;        // given at the first admission, for good
    FairShares::Account* account = nullptr;  // of the user
    std::int32_t num_rows = 0;               // in flight that refer to it
    std::int32_t num_pending = 0;            // of them, those that sample a token which will count
    std::int32_t pending_index = 0;          // where the last step planned samples the pending one
    std::uint64_t last_step = 0;             // the last that has a row of it
    std::int32_t num_computed_max = 0;       // tokens before this have been computed at least once
    std::int32_t num_in_vain = 0;         // ready ones when it lost them all, idle; 0: it did not
    std::int32_t num_charged = 0;         // tokens before this are in the user's account
    bool opened = false;                  // the workers know its logit rules
    std::optional<Seconds> preempted_at;  // since when it has waited with its blocks lost
  };
  struct Draft {
    // Below it, to wait for each step and to verify costs about as much as drafts bring.
    static constexpr float kBenefitMin = 0.25F;

    std::int32_t tokens_max = 0;  // per step; 0: takes none
    Golden golden;
    NgramIndex ngrams;               // of known tokens, as far as somebody asked
    std::vector<TokenId> proposed;   // by the draft head, for what follows the last token
    std::vector<float> confidences;  // what it gives each
    float acceptance = 0.5F;         // of drafts by n-gram: a moving average
    float benefit = kBenefitMin;     // how many tokens n-gram drafts give or would give: another
    std::int64_t num_verified = 0;
    std::int64_t num_accepted = 0;
  };
  struct Structured {
    bool wanted = false;
    bool grammar_ready = false;  // in this launch of the workers
  };
  struct Output {
    std::vector<TokenId> tokens;
    std::optional<Seconds> pixels_in;  // the last of them
    std::optional<Seconds> first_scheduled;
    std::optional<Seconds> first_token;
    std::int32_t num_preemptions = 0;
    std::int32_t num_cached = 0;          // tokens found in the cache at the first admission
    std::int32_t num_scores_told = 0;     // prompt positions, from the first, whose records are out
    std::int32_t num_scores_pending = 0;  // and those after them that steps in flight bring
    Seconds preempted_s = 0;
  };

  RequestGroup request;
  Input input;
  Cache cache;
  std::vector<BlockKey> keys;  // of the first full blocks of known tokens, as far as somebody asked
  Generation generation;
  Schedule schedule;
  Draft draft;
  Structured structured;
  Output output;

  // Bring it into the caches; then, once it is there, what a new token is looked at with.
  void Prefetch() const {
    const char* const begin = reinterpret_cast<const char*>(this);
    for (std::size_t i = 0; i < sizeof(Sequence); i += 64) __builtin_prefetch(begin + i, 1);
  }
  void PrefetchOutput() const {
    __builtin_prefetch(output.tokens.data() + output.tokens.size(), 1);
    __builtin_prefetch(generation.stop_token_ids.data());
  }

  Status status() const { return schedule.lifecycle.status(); }
  std::int32_t NumMade() const { return static_cast<std::int32_t>(output.tokens.size()); }
  std::int32_t PromptLength() const { return static_cast<std::int32_t>(input.prompt.size()); }
  std::int32_t Length() const { return PromptLength() + NumMade(); }
  std::int32_t VirtualLength() const { return Length() + schedule.num_pending; }
  std::int32_t NumPlanned() const { return cache.num_computed + cache.num_in_flight; }

  bool ShapesKnown() const;

  // Tokens [0, ReadyLength()) may be computed; or could be, if those images were encoded whose
  // pixels are in.
  std::int32_t ReadyLength(bool as_if_encoded = false) const;

  // The last place, up to `end`, at which a row may end: `end` itself, or the first token of the
  // run of image tokens that it would split. Tokens of such a run attend to one another, also to
  // those ahead, so the step that computes the last of them computes all that the cache has not.
  // What the cache has was computed in such a step, from the same picture: see ContentOf.
  std::int32_t WholeImagesEnd(std::int32_t end) const;

  // The longest such run; 0: rows may end anywhere.
  std::int32_t LongestWholeImage() const;

  // Whether it will have ended, by its length, once the pending tokens are known.
  bool CertainToEnd() const {
    return schedule.num_pending > 0 && (NumMade() + schedule.num_pending >= generation.tokens_max ||
                                        VirtualLength() >= generation.length_max);
  }

  // Whether a step planned now could have a row of it. Who lost its blocks when it could get no
  // further computes them again only when it can: two of those would else take blocks from one
  // another in turns. One that waits has lost what its pending tokens are computed from, so nothing
  // may follow them before they are known.
  bool Schedulable(bool as_if_encoded = false) const {
    const std::int32_t ready = ReadyLength(as_if_encoded);
    if (std::max(NumPlanned(), schedule.num_in_vain) >= ready) return false;
    return schedule.num_pending == 0 || (status() == Status::kRunning && !CertainToEnd());
  }

  // Has made tokens, and only the last of them is left to plan.
  bool Decoding() const {
    return VirtualLength() > PromptLength() && NumPlanned() == VirtualLength() - 1;
  }

  // Whether drafts may follow its last token, so that it must be known before the next row.
  bool TakesDrafts() const;

  // Tokens of the prompt that came from expansions.
  std::int32_t NumImageTokens() const;

  // How many positions fewer than tokens the pictures take that end before a place.
  std::int32_t PositionShift(std::int32_t position) const;

  // Appends tokens [begin, end) of prompt and output to `to`.
  void AppendTokens(std::int32_t begin, std::int32_t end, std::vector<TokenId>& to) const;

  // What the token counts as in the key of its block.
  std::uint64_t ContentOf(std::int32_t position, std::optional<TokenId> image_token_id) const;
};

Sequence MakeSequence(Request request, std::uint64_t serial, const EngineConfig& config);

// Puts every expansion in the place of its mark; all shapes must be known.
void ExpandPrompt(Sequence::Input& input, std::optional<TokenId> image_token_id);

// Whether `a` comes before `b`, both of which were admitted before: priority, turn. What has never
// been admitted comes after, by its serial; the queue has an order of its own for those.
bool ComesBefore(const Sequence& a, const Sequence& b);

struct InOrder {
  bool operator()(const Sequence* a, const Sequence* b) const { return ComesBefore(*a, *b); }
};

}  // namespace airside
