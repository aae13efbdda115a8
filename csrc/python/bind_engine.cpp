#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "python/bindings.h"
#include "python/columns.h"

namespace nb = nanobind;

namespace airside {
namespace {

std::span<const std::byte> AsBytes(const nb::bytes& bytes) {
  return {static_cast<const std::byte*>(bytes.data()), bytes.size()};
}

}  // namespace

void BindEngine(nb::module_& m) {
  nb::class_<Engine>(m, "Engine",
                     "The state machine that owns every live sequence. It has no clock: `now` is "
                     "unix time, as are arrivals and deadlines. Not thread-safe.")
      .def(nb::init<const EngineConfig&>(), nb::arg("config"))
      .def("add", &Engine::Add, nb::arg("request"), nb::arg("now"),
           "Takes a request in and returns None, or says why not.")
      .def(
          "set_shape",
          [](Engine& self, std::uint64_t seq_id, int image_index, const nb::bytes& expansion,
             const nb::bytes& content_hash, std::int32_t rope_advance) {
            ImageShape shape{.expansion = FromBytes<TokenId>(expansion),
                             .content = ToHash(content_hash)};
            if (rope_advance != 0) shape.rope_advance = rope_advance;
            return self.SetShape(SeqId{seq_id}, image_index, std::move(shape));
          },
          nb::arg("seq_id"), nb::arg("image_index"), nb::arg("expansion"),
          nb::arg("content_hash") = nb::bytes(""), nb::arg("rope_advance") = 0,
          "The tokens (i32) that take the place of an image's mark; images may come in any order. "
          "`content_hash` (16 bytes), if any, takes the place of the request's hash of this image. "
          "`rope_advance`: by how much the rope position of the token after the expansion is more "
          "than that of its first; 0: by the number of its tokens. "
          "False: the sequence is not live (any more), or the shape is known already.\n\n"
          "Raises ValueError when there is no such image, the expansion is empty, one of its "
          "tokens is outside the vocabulary, the hash has another size, or positions cannot go on "
          "so: by less than nothing, by more than the number of tokens, or by fewer with no image "
          "token among them.")
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
          "set_grammar_ready",
          [](Engine& self, std::uint64_t seq_id) { return self.SetGrammarReady(SeqId{seq_id}); },
          nb::arg("seq_id"),
          "The grammar of a structured sequence is built: it may sample. To be said again after "
          "`fail_step`. False: it is not live, not structured, or this is known already.")
      .def(
          "fail_grammar",
          [](Engine& self, std::uint64_t seq_id, std::string detail) {
            return self.FailGrammar(SeqId{seq_id}, std::move(detail));
          },
          nb::arg("seq_id"), nb::arg("detail"),
          "Ends a sequence because of its grammar. False: it is not live.")
      .def(
          "stop",
          [](Engine& self, std::uint64_t seq_id, std::int64_t num_tokens, std::string detail) {
            return self.Stop(SeqId{seq_id}, num_tokens, std::move(detail));
          },
          nb::arg("seq_id"), nb::arg("num_tokens"), nb::arg("detail"),
          "Ends a sequence with the reason \"stop\", as somebody found the end in its output: of "
          "its tokens the first `num_tokens` count. False: it is not live.")
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
           "Ends sequences whose deadline has passed; then returns the next step, or None when no "
           "more may be in flight or nothing can move.")
      .def(
          "apply",
          [](Engine& self, std::uint64_t step_id, const nb::bytes& sampled, Seconds now,
             const nb::bytes& logprobs, const nb::bytes& prompt_logprobs,
             const nb::bytes& num_drafts, const nb::bytes& draft_tokens,
             const nb::bytes& draft_confidences) {
            const auto tokens = FromBytes<TokenId>(sampled);
            const auto counts = FromBytes<std::int32_t>(num_drafts);
            const auto drafts = FromBytes<TokenId>(draft_tokens);
            const auto confidences = FromBytes<float>(draft_confidences);
            self.Apply(StepId{step_id},
                       {.sampled = tokens,
                        .logprobs = AsBytes(logprobs),
                        .prompt_logprobs = AsBytes(prompt_logprobs),
                        .num_drafts = counts,
                        .draft_tokens = drafts,
                        .draft_confidences = confidences},
                       now);
          },
          nb::arg("step_id"), nb::arg("sampled"), nb::arg("now"), nb::kw_only(),
          nb::arg("logprobs") = nb::bytes(""), nb::arg("prompt_logprobs") = nb::bytes(""),
          nb::arg("num_drafts") = nb::bytes(""), nb::arg("draft_tokens") = nb::bytes(""),
          nb::arg("draft_confidences") = nb::bytes(""),
          "Closes the oldest step in flight; columns as in messages.StepResult, with one token "
          "(i32) per sampled position. A negative one is none, and ends its sequence: -1 as "
          "\"abort\", -2 as \"structured_output_failed\".\n\n"
          "Raises ValueError, with nothing changed, when another step or columns of other sizes "
          "were expected, or no model makes a token that was sampled.")
      .def("fail_step", &Engine::FailStep, nb::arg("now"),
           "The steps in flight, if any, and all KV are lost: every sequence waits again, "
           "structured ones for their grammars too. Also ends sequences whose deadline has "
           "passed, so call it while there are no workers.")
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
      .def(
          "output_ids",
          [](const Engine& self, std::uint64_t seq_id) {
            return ToBytes(self.OutputIds(SeqId{seq_id}));
          },
          nb::arg("seq_id"), "i32: what it has made; empty when it is not live.")
      .def(
          "structured_ids",
          [](const Engine& self) {
            std::vector<std::uint64_t> ids;
            for (const SeqId id : self.StructuredIds())
              ids.push_back(static_cast<std::uint64_t>(id));
            return ids;
          },
          "Live sequences with a grammar, in order of adding.")
      .def("check", &Engine::Check,
           "Looks at everything.\n\nRaises RuntimeError that names a broken invariant.")
      .def_prop_ro("has_work", &Engine::HasWork,
                   "Whether `schedule` could return a plan now. With none in flight it will; with "
                   "one in flight it may find that nothing else has room yet.")
      .def_prop_ro("steps_in_flight", &Engine::StepsInFlight, "0, 1 or 2.");
}

}  // namespace airside
