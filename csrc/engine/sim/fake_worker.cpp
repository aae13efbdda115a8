#include "engine/sim/fake_worker.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "engine/ensure.h"

namespace airside::sim {
namespace {

constexpr Prefix kDead{0xDEAD, -7};

// Hands out the embeddings of a plan's images, one by one.
class Pictures {
 public:
  explicit Pictures(const std::vector<ImageSlice>& slices) : slices_(slices) {}

  // Image and place of the next one, which must be this sequence's.
  std::pair<std::int32_t, std::int32_t> Next(SeqId seq_id) {
    Ensure(slice_ < slices_.size(), "an image token without a picture");
    const ImageSlice& slice = slices_[slice_];
    Ensure(slice.seq_id == seq_id, "an image token with somebody else's picture");
    const std::pair next{slice.image_index, slice.embed_start + used_};
    if (++used_ == slice.embed_count) {
      ++slice_;
      used_ = 0;
    }
    return next;
  }

  bool AllUsed() const { return slice_ == slices_.size() && used_ == 0; }

 private:
  const std::vector<ImageSlice>& slices_;
  std::size_t slice_ = 0;
  std::int32_t used_ = 0;
};

}  // namespace

Digest DigestGrammar(const std::vector<TokenId>& tokens, std::span<const TokenId> drafts) {
  Digest digest = 3;
  for (const TokenId token : tokens) digest = Mix(digest, static_cast<std::uint64_t>(token));
  for (const TokenId token : drafts) digest = Mix(digest, static_cast<std::uint64_t>(token));
  return digest;
}

StepResult FakeResult::View() const {
  return {.sampled = sampled,
          .logprobs = std::as_bytes(std::span(logprobs)),
          .prompt_logprobs = std::as_bytes(std::span(prompt_logprobs)),
          .num_drafts = num_drafts,
          .draft_tokens = draft_tokens,
          .draft_confidences = draft_confidences};
}

FakeWorker::FakeWorker(const EngineConfig& config, std::uint64_t seed)
    : config_(config),
      random_(seed),
      pool_(static_cast<std::size_t>(config.PoolTokens()), Cell{kDead, kDead}),
      ring_(config.max_draft_tokens + 2),
      slots_(static_cast<std::size_t>(config.num_state_slots) * ring_),
      block_ends_(config.num_blocks) {}

void FakeWorker::Restart() {
  std::fill(pool_.begin(), pool_.end(), Cell{kDead, kDead});
  std::fill(slots_.begin(), slots_.end(), State{});
  std::fill(block_ends_.begin(), block_ends_.end(), State{});
  opened_.clear();
  grammars_.clear();
  last_sampled_.clear();
  last_step_ = {};
}

void FakeWorker::OpenGrammar(SeqId seq_id, std::vector<TokenId> output) {
  const bool is_new = grammars_.emplace(seq_id, Grammar{std::move(output)}).second;
  Ensure(is_new, "a grammar was opened twice in one launch");
}

FakeResult FakeWorker::Execute(const StepPlan& plan) {
  const std::vector<PlanRow> rows = ReadRows(plan);
  Open(plan);
  FakeResult result;
  Pictures pictures(plan.images);
  // A layer takes up the states of all rows before it writes those that they leave.
  std::vector<Digest> states(rows.size());
  if (config_.num_state_slots > 0) {
    std::transform(rows.begin(), rows.end(), states.begin(),
                   [&](const PlanRow& row) { return ReadState(row); });
  }
  for (std::size_t i = 0; i < rows.size(); ++i) {
    Work work{.plan = plan, .row = rows[i]};
    ResolveTokens(work);
    ComputeKv(work, [&](SeqId seq_id) { return pictures.Next(seq_id); });
    if (config_.num_state_slots > 0) ComputeStates(work, states[i]);
    Remember(work);
    ScorePrompt(work, i, result);
    if (rows[i].num_sampled > 0) SampleRow(work, result);
  }
  Ensure(pictures.AllUsed(), "the plan names a picture that no token needs");
  last_step_ = plan.step_id;
  last_sampled_ = result.sampled;
  return result;
}

void FakeWorker::Open(const StepPlan& plan) {
  for (const SeqId seq_id : plan.closed) {
    Ensure(opened_.erase(seq_id) == 1, "somebody was closed who was not open");
  }
  for (const Opened& opened : plan.opened) {
    History history{opened.num_prompt_tokens, DigestRules(opened.logit_rules), opened.token_ids};
    Ensure(opened_.emplace(opened.seq_id, std::move(history)).second, "somebody was opened twice");
  }
}

void FakeWorker::ResolveTokens(Work& work) const {
  for (const TokenId token : work.row.tokens) {
    if (token >= 0) {
      work.tokens.push_back(token);
      continue;
    }
    Ensure(
        static_cast<std::uint64_t>(last_step_) + 1 == static_cast<std::uint64_t>(work.plan.step_id),
        "a placeholder in a plan whose predecessor was not computed");
    // Where nothing was sampled the sequence has ended: whatever the row makes, nobody sees.
    const TokenId sampled = last_sampled_.at(static_cast<std::size_t>(-1 - token));
    work.is_in_vain = sampled < 0;
    work.tokens.push_back(std::max(sampled, 0));
  }
}

Prefix FakeWorker::ReadKv(const PlanRow& row) {
  Prefix prefix = StartPrefix(passengers_.at(row.seq_id).salt);
  for (std::int32_t position = 0; position < row.begin; ++position) {
    const Cell& cell = At(row, position);
    Ensure(cell.before == prefix, "a block whose content does not follow what is before it");
    prefix = cell.after;
  }
  return prefix;
}

void FakeWorker::ComputeKv(Work& work, const NextPicture& next_picture) {
  const PlanRow& row = work.row;
  Prefix prefix = ReadKv(row);
  for (std::size_t i = 0; i < work.tokens.size(); ++i) {
    const Prefix before = prefix;
    if (work.tokens[i] == config_.image_token_id) {
      const auto [image, place] = next_picture(row.seq_id);
      const auto& contents = passengers_.at(row.seq_id).pictures;
      prefix = ExtendByPicture(before, contents.at(static_cast<std::size_t>(image)), place);
    } else {
      prefix = Extend(before, work.tokens[i]);
    }
    At(row, row.begin + static_cast<std::int32_t>(i)) = {before, prefix};
    work.prefixes.push_back(prefix);
  }
}

Digest FakeWorker::ReadState(const PlanRow& row) const {
  Ensure(row.state_slot >= 0 && row.state_slot < config_.num_state_slots, "no such state slot");
  if (row.begin == 0) {
    Ensure(row.state_from == BlockId{-1}, "a state taken up before the first token");
    return Mix(0, 0);
  }
  if (row.state_from != BlockId{-1}) {
    Ensure(row.begin % config_.block_size == 0 &&
               row.state_from == row.blocks[row.begin / config_.block_size - 1],
           "a state taken up from another block than the one before the row");
    const State& state = block_ends_.at(static_cast<std::size_t>(row.state_from));
    Ensure(state.position == row.begin - 1, "a block without the state at its end");
    return state.digest;
  }
  const State& state = slots_.at(row.state_slot * ring_ + (row.begin - 1) % ring_);
  Ensure(state.position == row.begin - 1, "a state slot that does not know the position before");
  return state.digest;
}

void FakeWorker::ComputeStates(Work& work, Digest digest) {
  const PlanRow& row = work.row;
  for (std::size_t i = 0; i < work.tokens.size(); ++i) {
    const std::int32_t position = row.begin + static_cast<std::int32_t>(i);
    digest = Mix(digest, static_cast<std::uint64_t>(work.tokens[i]));
    slots_[row.state_slot * ring_ + position % ring_] = {position, digest};
    if ((position + 1) % config_.block_size == 0) {
      const BlockId block = row.blocks[position / config_.block_size];
      block_ends_.at(static_cast<std::size_t>(block)) = {position, digest};
    }
    work.states.push_back(digest);
  }
}

// Of an opened sequence the history is kept from plans; drafts are in it only once accepted.
void FakeWorker::Remember(const Work& work) {
  const auto at = opened_.find(work.row.seq_id);
  Ensure((at != opened_.end()) == passengers_.at(work.row.seq_id).has_rules,
         "rules that were not told, or nobody has");
  if (at == opened_.end()) return;
  std::vector<TokenId>& tokens = at->second.tokens;
  const std::size_t num_known = work.tokens.size() - work.row.num_drafts();
  for (std::size_t i = 0; i < num_known; ++i) {
    const std::size_t position = work.row.begin + i;
    Ensure(position <= tokens.size(), "a history with a hole");
    if (position == tokens.size()) {
      tokens.push_back(work.tokens[i]);
    } else {
      tokens[position] = work.tokens[i];
    }
  }
}

void FakeWorker::SampleRow(const Work& work, FakeResult& result) {
  const auto index = static_cast<std::size_t>(work.row.sampling_index);
  std::vector<TokenId> accepted;
  bool goes_on = true;
  for (std::int32_t drafts = 0; drafts < work.row.num_sampled; ++drafts) {
    const TokenId token = SamplePosition(work, drafts, result);
    result.sampled.push_back(token);
    if (goes_on) accepted.push_back(token);
    goes_on = goes_on && drafts < work.row.num_drafts() && token == work.row.drafts()[drafts];
  }
  if (accepted.back() >= 0 && !work.is_in_vain) Accept(work, accepted);
  const std::int32_t wanted = work.plan.drafts_wanted.empty() ? 0 : work.plan.drafts_wanted[index];
  if (config_.draft_method == DraftMethod::kMtp) result.num_drafts.push_back(0);
  if (wanted > 0 && accepted.back() >= 0) Propose(work, accepted, result);
}

TokenId FakeWorker::SamplePosition(const Work& work, std::int32_t drafts,
                                   FakeResult& result) const {
  const PlanRow& row = work.row;
  const StepPlan& plan = work.plan;
  const auto index = static_cast<std::size_t>(row.sampling_index);
  const std::size_t at = work.tokens.size() - row.num_sampled + drafts;
  const std::int32_t flat = row.first_position + drafts;
  const auto banned = plan.banned.find(flat);
  Draw draw{.prefix = work.prefixes[at],
            .state = work.states.empty() ? 0 : work.states[at],
            .seed = plan.seed[index],
            .position = plan.position[index] + drafts,
            .history = WeighHistory(work, plan.position[index], drafts)};
  std::vector<TokenId> never;  // a token that only pictures may bring
  if (banned != plan.banned.end()) never = banned->second;
  if (config_.image_token_id) never.push_back(*config_.image_token_id);
  draw.banned = never;
  if (!plan.structured.empty() && plan.structured[index] == 1 && !work.is_in_vain) {
    const auto grammar = grammars_.find(row.seq_id);
    Ensure(grammar != grammars_.end(), "a structured row whose grammar is not built");
    const auto num_made = static_cast<std::size_t>(plan.position[index]);
    Ensure(num_made <= grammar->second.tokens.size(), "a grammar that missed a token");
    const auto& made = grammar->second.tokens;
    draw.grammar =
        DigestGrammar({made.begin(), made.begin() + num_made}, row.drafts().first(drafts));
  }
  TokenId token = Sample(draw);
  if (!plan.forced.empty() && plan.forced[flat] >= 0) token = plan.forced[flat];
  if (!plan.logprobs.empty() && plan.logprobs[index] >= 0) {
    AppendRecord(draw.prefix, token, plan.logprobs[index], result.logprobs);
  }
  return token;
}

Digest FakeWorker::WeighHistory(const Work& work, std::int64_t num_made,
                                std::int32_t drafts) const {
  const auto at = opened_.find(work.row.seq_id);
  if (at == opened_.end() || work.is_in_vain) return 0;
  const History& history = at->second;
  const auto length = static_cast<std::size_t>(history.num_prompt_tokens + num_made);
  Ensure(length <= history.tokens.size(), "a history that ends too early");
  Digest weight = 0;
  for (std::size_t i = 0; i < length; ++i) weight += WeighToken(history.rules, history.tokens[i]);
  for (const TokenId draft : work.row.drafts().first(drafts)) {
    weight += WeighToken(history.rules, draft);
  }
  return weight;
}

void FakeWorker::Accept(const Work& work, std::vector<TokenId> accepted) {
  const auto index = static_cast<std::size_t>(work.row.sampling_index);
  const auto num_made = static_cast<std::size_t>(work.plan.position[index]);
  const auto extend = [&](std::vector<TokenId>& tokens, std::size_t length) {
    tokens.resize(length);
    tokens.insert(tokens.end(), accepted.begin(), accepted.end());
  };
  if (const auto at = opened_.find(work.row.seq_id); at != opened_.end()) {
    extend(at->second.tokens, at->second.num_prompt_tokens + num_made);
  }
  if (const auto at = grammars_.find(work.row.seq_id); at != grammars_.end()) {
    extend(at->second.tokens, num_made);
  }
}

// What the model would go on with, as far as the head can tell: it knows no rules and no grammar,
// and is wrong now and then.
void FakeWorker::Propose(const Work& work, const std::vector<TokenId>& accepted,
                         FakeResult& result) {
  const auto index = static_cast<std::size_t>(work.row.sampling_index);
  const std::size_t at = work.tokens.size() - work.row.num_sampled + accepted.size() - 1;
  Prefix prefix = Extend(work.prefixes[at], accepted.back());
  Digest state =
      work.states.empty() ? 0 : Mix(work.states[at], static_cast<std::uint64_t>(accepted.back()));
  std::int64_t position = work.plan.position[index] + static_cast<std::int64_t>(accepted.size());
  const auto count = static_cast<std::int32_t>(random_() % (work.plan.drafts_wanted[index] + 1));
  static constexpr TokenId kBanned[] = {kImageToken};
  for (std::int32_t i = 0; i < count; ++i, ++position) {
    TokenId token = Sample({.prefix = prefix,
                            .state = state,
                            .seed = work.plan.seed[index],
                            .position = position,
                            .banned = kBanned});
    if (token < 0 || random_() % 4 == 0) token = static_cast<TokenId>(8 + random_() % 20);
    result.draft_tokens.push_back(token);
    result.draft_confidences.push_back(static_cast<float>(random_() % 1000) / 1000.0F);
    prefix = Extend(prefix, token);
    if (state != 0) state = Mix(state, static_cast<std::uint64_t>(token));
  }
  result.num_drafts.back() = count;
}

void FakeWorker::ScorePrompt(const Work& work, std::size_t index, FakeResult& result) const {
  for (const PromptScores& scores : work.plan.prompt_logprobs) {
    if (static_cast<std::size_t>(scores.row) != index) continue;
    for (std::size_t i = 0; i < scores.targets.size(); ++i) {
      AppendRecord(work.prefixes.at(scores.start + i), scores.targets[i], scores.alternatives,
                   result.prompt_logprobs);
    }
  }
}

FakeWorker::Cell& FakeWorker::At(const PlanRow& row, std::int32_t position) {
  const auto block = static_cast<std::size_t>(row.blocks[position / config_.block_size]);
  return pool_.at(block * config_.block_size + position % config_.block_size);
}

}  // namespace airside::sim
