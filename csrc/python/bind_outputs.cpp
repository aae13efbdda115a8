#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <map>
#include <string_view>

#include "engine/engine.h"
#include "python/bindings.h"
#include "python/columns.h"
#include "python/frame.h"

namespace nb = nanobind;

namespace airside {
namespace {

void BindStats(nb::module_& m) {
  nb::class_<Stats>(m, "Stats", "Numbers of one moment, and counts since the start.")
      .def_ro("num_waiting", &Stats::num_waiting, "Sequences that wait.")
      .def_ro("num_running", &Stats::num_running, "Sequences that run.")
      .def_ro("blocks_total", &Stats::blocks_total, "KV blocks in the pool.")
      .def_ro("blocks_live", &Stats::blocks_live, "KV blocks in use.")
      .def_ro("blocks_cached", &Stats::blocks_cached,
              "KV blocks not in use whose content can be found.")
      .def_ro("blocks_free", &Stats::blocks_free, "KV blocks not in use, cached ones included.")
      .def_ro("num_preemptions", &Stats::num_preemptions,
              "How often a sequence's KV was given to others.")
      .def_ro("recomputed_tokens", &Stats::recomputed_tokens,
              "Tokens computed again after a preemption or a lost step.")
      .def_ro("steps", &Stats::steps, "Steps that came back.")
      .def_ro("prompt_tokens", &Stats::prompt_tokens, "Prompt tokens computed, each counted once.")
      .def_ro("generation_tokens", &Stats::generation_tokens, "Tokens told to clients.")
      .def_ro("prefix_cache_queries", &Stats::prefix_cache_queries,
              "Tokens looked up in the prefix cache, at each admission with nothing computed.")
      .def_ro("prefix_cache_hits", &Stats::prefix_cache_hits, "Of those, tokens found.")
      .def_ro("draft_tokens", &Stats::draft_tokens, "Draft tokens verified.")
      .def_ro("accepted_tokens", &Stats::accepted_tokens, "Of those, the ones that were right.")
      .def_ro("state_slots_total", &Stats::state_slots_total, "State slots.")
      .def_ro("state_slots_live", &Stats::state_slots_live, "State slots in use.")
      .def_prop_ro(
          "finished",
          [](const Stats& self) {
            std::map<std::string_view, std::int64_t> by_reason;
            for (const auto& [status, count] : self.finished) by_reason[Reason(status)] = count;
            return by_reason;
          },
          "Sequences ended, by reason; every reason is there.");
}

nb::bytes ToFrame(const ClientOutput& output, std::uint8_t version, std::uint32_t kind,
                  const nb::bytes& finished) {
  Frame frame(version, /*num_fields=*/10, kind);
  frame.Add(output.seq_ids);
  frame.Add(output.num_tokens);
  frame.Add(output.token_ids);
  frame.AddPacked(finished);
  frame.Add(output.step_tokens);
  frame.Add(output.logprob_sizes);
  frame.Add(output.logprobs);
  frame.Add(output.prompt_seq_ids);
  frame.Add(output.prompt_sizes);
  frame.Add(output.prompt_logprobs);
  return frame.ToBytes();
}

}  // namespace

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
              "Tokens made, a stop token included; of those, what `stop` said.")
      .def_ro("preemptions", &Finish::preemptions, "How often its KV was given to others.")
      .def_ro("queued_s", &Finish::queued_s,
              "From arrival to its first step, or to its end if it never ran.")
      .def_ro("time_to_first_token_s", &Finish::time_to_first_token_s,
              "From arrival to the first token; 0 without one.")
      .def_ro("decode_s", &Finish::decode_s, "From the first token to the end; 0 without a token.")
      .def_ro("cached_tokens", &Finish::cached_tokens,
              "Of the prompt, found in the prefix cache at its first admission.")
      .def_ro("draft_tokens", &Finish::draft_tokens, "Draft tokens verified.")
      .def_ro("accepted_tokens", &Finish::accepted_tokens, "Of those, the ones that were right.")
      .def_ro("vision_wait_s", &Finish::vision_wait_s,
              "From arrival until all pixels were in; 0 without images.")
      .def_ro("prefill_s", &Finish::prefill_s,
              "From the first step to the first token; 0 without one.")
      .def_ro("preempted_s", &Finish::preempted_s,
              "From losing its blocks, to others or with the workers, to its next step.")
      .def_ro("stage", &Finish::stage,
              "What it was at: \"images\" (some of its pixels were not in), \"queue\" (it never "
              "ran), \"prefill\" or \"decode\".");

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
      .def_ro("finished", &ClientOutput::finished, "Ends, in the order in which they came.")
      .def_ro("step_tokens", &ClientOutput::step_tokens,
              "Tokens of the latest step that made any of these, over all sequences.")
      .def_prop_ro(
          "logprob_sizes", [](const ClientOutput& self) { return ToBytes(self.logprob_sizes); },
          "i32 [rows]: bytes of each row's records, one per token; empty: nobody has any")
      .def_prop_ro(
          "logprobs", [](const ClientOutput& self) { return ToBytes(self.logprobs); },
          "Records as in logprob_record.py.")
      .def_prop_ro(
          "prompt_seq_ids", [](const ClientOutput& self) { return ToBytes(self.prompt_seq_ids); },
          "u64: sequences of whose next prompt positions there are records")
      .def_prop_ro(
          "prompt_sizes", [](const ClientOutput& self) { return ToBytes(self.prompt_sizes); },
          "i32: bytes of each one's records")
      .def_prop_ro(
          "prompt_logprobs", [](const ClientOutput& self) { return ToBytes(self.prompt_logprobs); },
          "Records as in logprob_record.py.")
      .def("frame", &ToFrame, nb::arg("version"), nb::arg("kind"), nb::arg("finished"),
           "The frame of a messages.OutputBatch; its list comes packed.");
  BindStats(m);
}

}  // namespace airside
