// Bindings without logic: what the core takes and gives, in Python's words.

#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "engine/engine.h"

namespace nb = nanobind;

namespace airside {
namespace {

template <typename T>
nb::bytes ToBytes(const std::vector<T>& column) {
  return nb::bytes(column.data(), column.size() * sizeof(T));
}

template <typename T>
std::vector<T> FromBytes(const nb::bytes& bytes) {
  if (bytes.size() % sizeof(T) != 0) {
    throw std::invalid_argument(std::to_string(bytes.size()) + " bytes are no whole number of " +
                                std::to_string(sizeof(T)) + "-byte entries");
  }
  std::vector<T> column(bytes.size() / sizeof(T));
  if (!column.empty()) std::memcpy(column.data(), bytes.data(), bytes.size());
  return column;
}

void BindConfig(nb::module_& m) {
  const EngineConfig defaults;
  nb::class_<EngineConfig>(m, "EngineConfig", "The limits and habits of an engine.")
      .def(
          "__init__",
          [](EngineConfig* self, int num_blocks, int block_size, int max_num_seqs,
             int max_num_batched_tokens, int max_model_len, bool enable_chunked_prefill,
             bool prefill_first, bool strict_fifo, std::string_view preemption,
             std::optional<TokenId> image_token_id, int max_queued_requests,
             std::int64_t max_queued_tokens, std::optional<TokenId> vocab_size) {
            new (self) EngineConfig{.num_blocks = num_blocks,
                                    .block_size = block_size,
                                    .max_num_seqs = max_num_seqs,
                                    .max_num_batched_tokens = max_num_batched_tokens,
                                    .max_model_len = max_model_len,
                                    .enable_chunked_prefill = enable_chunked_prefill,
                                    .prefill_first = prefill_first,
                                    .strict_fifo = strict_fifo,
                                    .preemption = ParsePreemptionPolicy(preemption),
                                    .image_token_id = image_token_id,
                                    .max_queued_requests = max_queued_requests,
                                    .max_queued_tokens = max_queued_tokens,
                                    .vocab_size = vocab_size};
            Validate(*self);
          },
          nb::kw_only(), nb::arg("num_blocks"), nb::arg("block_size"), nb::arg("max_num_seqs"),
          nb::arg("max_num_batched_tokens"), nb::arg("max_model_len"),
          nb::arg("enable_chunked_prefill") = defaults.enable_chunked_prefill,
          nb::arg("prefill_first") = defaults.prefill_first,
          nb::arg("strict_fifo") = defaults.strict_fifo,
          nb::arg("preemption") = Name(defaults.preemption), nb::arg("image_token_id") = nb::none(),
          nb::arg("max_queued_requests") = defaults.max_queued_requests,
          nb::arg("max_queued_tokens") = defaults.max_queued_tokens,
          nb::arg("vocab_size") = nb::none(),
          "Raises ValueError, naming the first value that makes no sense.")
      .def_ro("num_blocks", &EngineConfig::num_blocks, "KV blocks in the pool.")
      .def_ro("block_size", &EngineConfig::block_size, "Tokens that a block holds.")
      .def_ro("max_num_seqs", &EngineConfig::max_num_seqs,
              "Sequences that run at once, and rows of one step.")
      .def_ro("max_num_batched_tokens", &EngineConfig::max_num_batched_tokens,
              "Tokens of one step.")
      .def_ro("max_model_len", &EngineConfig::max_model_len,
              "Tokens of prompt and output together.")
      .def_ro("enable_chunked_prefill", &EngineConfig::enable_chunked_prefill,
              "Whether a prompt may be computed in parts where all of it would fit a step.")
      .def_ro("prefill_first", &EngineConfig::prefill_first,
              "Whether a step is all prompt or all decode, prompt first.")
      .def_ro("strict_fifo", &EngineConfig::strict_fifo,
              "Whether the queue stops at a front that waits for its images.")
      .def_prop_ro(
          "preemption", [](const EngineConfig& self) { return Name(self.preemption); },
          "\"recompute\" or \"stop\".")
      .def_ro("image_token_id", &EngineConfig::image_token_id,
              "The token whose positions are image embeddings; None: the model takes no images.")
      .def_ro("max_queued_requests", &EngineConfig::max_queued_requests, "Requests that may wait.")
      .def_ro("max_queued_tokens", &EngineConfig::max_queued_tokens, "Tokens that may wait.")
      .def_ro("vocab_size", &EngineConfig::vocab_size,
              "Token ids are below it; None: they are not checked.");
}

void BindRequest(nb::module_& m) {
  const Request defaults;
  nb::class_<Request>(m, "Request", "What a front end asks for; see messages.AddRequest.")
      .def(
          "__init__",
          [](Request* self, std::int64_t client, std::uint64_t seq_id, const nb::bytes& token_ids,
             Seconds arrival, std::string request_id, std::vector<std::int32_t> image_positions,
             std::int32_t priority, std::optional<Seconds> deadline,
             std::optional<std::int64_t> max_tokens, std::int64_t min_tokens,
             std::vector<TokenId> stop_token_ids, float temperature, std::int32_t top_k,
             float top_p, float min_p, std::uint64_t seed) {
            new (self) Request{.client = ClientId{client},
                               .seq_id = SeqId{seq_id},
                               .request_id = std::move(request_id),
                               .token_ids = FromBytes<TokenId>(token_ids),
                               .image_positions = std::move(image_positions),
                               .arrival = arrival,
                               .priority = priority,
                               .deadline = deadline,
                               .max_tokens = max_tokens,
                               .min_tokens = min_tokens,
                               .stop_token_ids = std::move(stop_token_ids),
                               .sampling = {.temperature = temperature,
                                            .top_k = top_k,
                                            .top_p = top_p,
                                            .min_p = min_p,
                                            .seed = seed}};
          },
          nb::kw_only(), nb::arg("client"), nb::arg("seq_id"), nb::arg("token_ids"),
          nb::arg("arrival"), nb::arg("request_id") = "",
          nb::arg("image_positions") = std::vector<std::int32_t>{},
          nb::arg("priority") = defaults.priority, nb::arg("deadline") = nb::none(),
          nb::arg("max_tokens") = nb::none(), nb::arg("min_tokens") = defaults.min_tokens,
          nb::arg("stop_token_ids") = std::vector<TokenId>{},
          nb::arg("temperature") = defaults.sampling.temperature,
          nb::arg("top_k") = defaults.sampling.top_k, nb::arg("top_p") = defaults.sampling.top_p,
          nb::arg("min_p") = defaults.sampling.min_p, nb::arg("seed") = defaults.sampling.seed,
          "`client` says which front end asks; outputs are grouped by it. `token_ids` is i32.")
      .def_prop_ro(
          "client", [](const Request& self) { return static_cast<std::int64_t>(self.client); },
          "The front end that asks.")
      .def_prop_ro(
          "seq_id", [](const Request& self) { return static_cast<std::uint64_t>(self.seq_id); },
          "The sequence's id.");
}

void BindRejection(nb::module_& m) {
  nb::class_<Rejection>(m, "Rejection", "Why a request was not taken in; see messages.Rejected.")
      .def_prop_ro(
          "code", [](const Rejection& self) { return Name(self.code); },
          "\"duplicate_id\", \"invalid\", \"context_exceeded\", \"pool_exceeded\" or "
          "\"queue_full\".")
      .def_ro("detail", &Rejection::detail, "A sentence with the numbers.");
}

template <auto Column>
void DefColumn(nb::class_<StepPlan>& cls, const char* name, const char* doc) {
  cls.def_prop_ro(name, [](const StepPlan& self) { return ToBytes(self.*Column); }, doc);
}

void BindStepPlan(nb::module_& m) {
  nb::class_<StepPlan> cls(m, "StepPlan",
                           "One step, complete in itself; columns as in messages.StepPlan.");
  cls.def_prop_ro(
         "step_id", [](const StepPlan& self) { return static_cast<std::uint64_t>(self.step_id); },
         "Counts the steps from 1; what `apply` must name.")
      .def_prop_ro(
          "num_seqs", [](const StepPlan& self) { return self.seq_ids.size(); }, "Rows.")
      .def_prop_ro(
          "num_tokens", [](const StepPlan& self) { return self.token_ids.size(); },
          "Tokens to compute, over all rows.")
      .def_ro("banned", &StepPlan::banned, "Sampled row -> token ids that must not be sampled.")
      .def_prop_ro(
          "images",
          [](const StepPlan& self) {
            std::vector<std::tuple<std::uint64_t, int, int, int>> rows;
            for (const ImageSlice& image : self.images) {
              rows.emplace_back(static_cast<std::uint64_t>(image.seq_id), image.image_index,
                                image.embed_start, image.embed_count);
            }
            return rows;
          },
          "(seq_id, image_index, embed_start, embed_count) of each image touched, in token order.");
  DefColumn<&StepPlan::seq_ids>(cls, "seq_ids", "u64 [num_seqs]");
  DefColumn<&StepPlan::num_computed>(cls, "num_computed", "i32 [num_seqs]");
  DefColumn<&StepPlan::num_new>(cls, "num_new", "i32 [num_seqs]");
  DefColumn<&StepPlan::token_ids>(cls, "token_ids", "i32 [num_tokens]");
  DefColumn<&StepPlan::num_blocks>(cls, "num_blocks", "i32 [num_seqs]: length of each table");
  DefColumn<&StepPlan::block_tables>(cls, "block_tables", "i32 [sum(num_blocks)]");
  DefColumn<&StepPlan::sampled>(cls, "sampled", "u8 [num_seqs]: 1 where a token is sampled");
  DefColumn<&StepPlan::temperature>(cls, "temperature", "f32 [num_sampled]");
  DefColumn<&StepPlan::top_k>(cls, "top_k", "i32 [num_sampled]");
  DefColumn<&StepPlan::top_p>(cls, "top_p", "f32 [num_sampled]");
  DefColumn<&StepPlan::min_p>(cls, "min_p", "f32 [num_sampled]");
  DefColumn<&StepPlan::seed>(cls, "seed", "u64 [num_sampled]");
  DefColumn<&StepPlan::position>(cls, "position", "i64 [num_sampled]: tokens made so far");
}

void BindOutputs(nb::module_& m) {
  nb::class_<Finish>(m, "Finish", "The one end of one sequence; see messages.FinishedRow.")
      .def_prop_ro(
          "seq_id", [](const Finish& self) { return static_cast<std::uint64_t>(self.seq_id); },
          "The sequence's id.")
      .def_prop_ro(
          "reason", [](const Finish& self) { return Reason(self.status); },
          "\"stop\", \"length\", \"abort\", \"prompt_length_exceeded\", "
          "\"insufficient_system_resource\", \"vision_failed\" or \"structured_output_failed\".")
      .def_ro("detail", &Finish::detail, "Which of the reason's causes it was.")
      .def_ro("prompt_tokens", &Finish::prompt_tokens,
              "Tokens of the prompt, expanded if all of its images' shapes were known.")
      .def_ro("image_tokens", &Finish::image_tokens, "Of those, what came from expansions.")
      .def_ro("completion_tokens", &Finish::completion_tokens,
              "Tokens made, a stop token included.")
      .def_ro("preemptions", &Finish::preemptions, "How often its KV was given to others.")
      .def_ro("queued_s", &Finish::queued_s,
              "From arrival to its first step, or to its end if it never ran.")
      .def_ro("time_to_first_token_s", &Finish::time_to_first_token_s,
              "From arrival to the first token; 0 without one.")
      .def_ro("decode_s", &Finish::decode_s, "From the first token to the end; 0 without a token.");

  nb::class_<ClientOutput>(m, "ClientOutput", "News for one client; see messages.OutputBatch.")
      .def_prop_ro(
          "client", [](const ClientOutput& self) { return static_cast<std::int64_t>(self.client); },
          "Whom it is for.")
      .def_prop_ro(
          "seq_ids", [](const ClientOutput& self) { return ToBytes(self.seq_ids); }, "u64 [rows]")
      .def_prop_ro(
          "num_tokens", [](const ClientOutput& self) { return ToBytes(self.num_tokens); },
          "i32 [rows]: how many of token_ids are the row's")
      .def_prop_ro(
          "token_ids", [](const ClientOutput& self) { return ToBytes(self.token_ids); },
          "i32 [sum(num_tokens)]")
      .def_ro("finished", &ClientOutput::finished, "Ends, in the order in which they came.");
}

void BindStats(nb::module_& m) {
  nb::class_<Stats>(m, "Stats", "Numbers of one moment, and counts since the start.")
      .def_ro("num_waiting", &Stats::num_waiting, "Sequences that wait.")
      .def_ro("num_running", &Stats::num_running, "Sequences that run.")
      .def_ro("blocks_total", &Stats::blocks_total, "KV blocks in the pool.")
      .def_ro("blocks_live", &Stats::blocks_live, "KV blocks in use.")
      .def_ro("blocks_free", &Stats::blocks_free, "KV blocks not in use.")
      .def_ro("num_preemptions", &Stats::num_preemptions,
              "How often a sequence's KV was given to others.")
      .def_ro("recomputed_tokens", &Stats::recomputed_tokens,
              "Tokens computed again after a preemption or a lost step.")
      .def_ro("steps", &Stats::steps, "Steps that came back.")
      .def_ro("prompt_tokens", &Stats::prompt_tokens, "Prompt tokens computed, each counted once.")
      .def_ro("generation_tokens", &Stats::generation_tokens, "Tokens told to clients.")
      .def_prop_ro(
          "finished",
          [](const Stats& self) {
            std::map<std::string_view, std::int64_t> by_reason;
            for (const auto& [status, count] : self.finished) by_reason[Reason(status)] = count;
            return by_reason;
          },
          "Sequences ended, by reason; every reason is there.");
}

void BindEngine(nb::module_& m) {
  nb::class_<Engine>(m, "Engine",
                     "The state machine that owns every live sequence. It has no clock: `now` is "
                     "unix time, as are arrivals and deadlines. Not thread-safe.")
      .def(nb::init<const EngineConfig&>(), nb::arg("config"))
      .def("add", &Engine::Add, nb::arg("request"), nb::arg("now"),
           "Takes a request in and returns None, or says why not.")
      .def(
          "set_shape",
          [](Engine& self, std::uint64_t seq_id, int image_index, const nb::bytes& expansion) {
            return self.SetShape(SeqId{seq_id}, image_index, FromBytes<TokenId>(expansion));
          },
          nb::arg("seq_id"), nb::arg("image_index"), nb::arg("expansion"),
          "The tokens (i32) that take the place of an image's mark; images may come in any order. "
          "False: the sequence is not live (any more), or the shape is known already.\n\n"
          "Raises ValueError when there is no such image, the expansion is empty, or one of its "
          "tokens is outside the vocabulary.")
      .def(
          "set_ready",
          [](Engine& self, std::uint64_t seq_id, int image_index) {
            return self.SetReady(SeqId{seq_id}, image_index);
          },
          nb::arg("seq_id"), nb::arg("image_index"),
          "The pixels of an image are in. False: the sequence is not live (any more), or this is "
          "known already.\n\n"
          "Raises ValueError when there is no such image, or its shape is not known yet.")
      .def(
          "abort",
          [](Engine& self, std::uint64_t seq_id, std::string cause) {
            return self.Abort(SeqId{seq_id}, std::move(cause));
          },
          nb::arg("seq_id"), nb::arg("cause"),
          "Ends a sequence now, with `cause` as the detail. False: it is not live.")
      .def(
          "fail_vision",
          [](Engine& self, std::uint64_t seq_id, std::string detail) {
            return self.FailVision(SeqId{seq_id}, std::move(detail));
          },
          nb::arg("seq_id"), nb::arg("detail"),
          "Ends a sequence because of one of its images. False: it is not live.")
      .def("schedule", &Engine::Schedule, nb::arg("now"),
           "Ends sequences whose deadline has passed; then returns the next step, or None when one "
           "is in flight or nothing can move.")
      .def(
          "apply",
          [](Engine& self, std::uint64_t step_id, const nb::bytes& sampled, Seconds now) {
            self.Apply(StepId{step_id}, FromBytes<TokenId>(sampled), now);
          },
          nb::arg("step_id"), nb::arg("sampled"), nb::arg("now"),
          "Closes the step in flight with one token (i32) per sampled row; a negative one is none, "
          "and ends its sequence.\n\n"
          "Raises ValueError, with nothing changed, when another step or another number of tokens "
          "was expected.")
      .def("fail_step", &Engine::FailStep, nb::arg("now"),
           "The step in flight, if any, and all KV are lost: every sequence waits again. Also ends "
           "sequences whose deadline has passed, so call it while there are no workers.")
      .def("take_outputs", &Engine::TakeOutputs,
           "New tokens and ends since the last call, one entry per client that has any.")
      .def("stats", &Engine::GetStats, "Numbers for gauges and counters.")
      .def(
          "status",
          [](const Engine& self, std::uint64_t seq_id) -> std::optional<std::string_view> {
            const auto status = self.StatusOf(SeqId{seq_id});
            if (!status) return std::nullopt;
            return Name(*status);
          },
          nb::arg("seq_id"), "\"WAITING\" or \"RUNNING\"; None: the sequence is not live.")
      .def(
          "queue_position",
          [](const Engine& self, std::uint64_t seq_id) {
            return self.QueuePosition(SeqId{seq_id});
          },
          nb::arg("seq_id"), "Waiting sequences ahead of this one; 0 when it does not wait.")
      .def("check", &Engine::Check,
           "Looks at everything.\n\nRaises RuntimeError that names a broken invariant.")
      .def_prop_ro("has_work", &Engine::HasWork, "Whether `schedule` could return a plan now.");
}

}  // namespace
}  // namespace airside

NB_MODULE(_core, m) {
  m.doc() = "The engine core: decides, step by step, what the model computes next.";
  airside::BindConfig(m);
  airside::BindRequest(m);
  airside::BindRejection(m);
  airside::BindStepPlan(m);
  airside::BindOutputs(m);
  airside::BindStats(m);
  airside::BindEngine(m);
}
