#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <tuple>
#include <vector>

#include "engine/step_plan.h"
#include "python/bindings.h"
#include "python/columns.h"
#include "python/frame.h"

namespace nb = nanobind;

namespace airside {
namespace {

template <auto Column>
void DefColumn(nb::class_<StepPlan>& cls, const char* name, const char* doc) {
  cls.def_prop_ro(name, [](const StepPlan& self) { return ToBytes(self.*Column); }, doc);
}

void BindOpened(nb::module_& m) {
  nb::class_<Opened>(m, "Opened", "What the sampler must know beyond the columns; see OpenedRow.")
      .def_prop_ro(
          "seq_id", [](const Opened& self) { return static_cast<std::uint64_t>(self.seq_id); },
          "The sequence's id.")
      .def_ro("num_prompt_tokens", &Opened::num_prompt_tokens, "Of `token_ids`.")
      .def_prop_ro(
          "token_ids", [](const Opened& self) { return ToBytes(self.token_ids); },
          "i32: prompt and output, as far as they are known.")
      .def_prop_ro(
          "repetition_penalty",
          [](const Opened& self) { return self.logit_rules.repetition_penalty; }, "1: none.")
      .def_prop_ro(
          "presence_penalty", [](const Opened& self) { return self.logit_rules.presence_penalty; },
          "0: none.")
      .def_prop_ro(
          "frequency_penalty",
          [](const Opened& self) { return self.logit_rules.frequency_penalty; }, "0: none.")
      .def_prop_ro(
          "logit_bias", [](const Opened& self) { return self.logit_rules.bias; },
          "Token -> what is added to its logit.")
      .def_prop_ro(
          "allowed_token_ids", [](const Opened& self) { return self.logit_rules.allowed; },
          "Empty: all.");
}

std::vector<std::tuple<std::uint64_t, int, int, int>> Images(const StepPlan& plan) {
  std::vector<std::tuple<std::uint64_t, int, int, int>> rows;
  for (const ImageSlice& image : plan.images) {
    rows.emplace_back(static_cast<std::uint64_t>(image.seq_id), image.image_index,
                      image.embed_start, image.embed_count);
  }
  return rows;
}

std::vector<std::tuple<std::uint64_t, int>> Ahead(const StepPlan& plan) {
  std::vector<std::tuple<std::uint64_t, int>> rows;
  for (const ImageId& image : plan.ahead) {
    rows.emplace_back(static_cast<std::uint64_t>(image.seq_id), image.image_index);
  }
  return rows;
}

std::vector<std::tuple<int, int, int, nb::bytes>> PromptRows(const StepPlan& plan) {
  std::vector<std::tuple<int, int, int, nb::bytes>> rows;
  for (const PromptScores& scores : plan.prompt_logprobs) {
    rows.emplace_back(scores.row, scores.start, scores.alternatives, ToBytes(scores.targets));
  }
  return rows;
}

// Whether none of the columns has rows that are more than numbers.
bool IsPlain(const StepPlan& plan) {
  return plan.images.empty() && plan.ahead.empty() && plan.prompt_logprobs.empty() &&
         plan.opened.empty();
}

nb::bytes ToFrame(const StepPlan& plan, std::uint8_t version, std::uint32_t kind,
                  const nb::bytes& images, const nb::bytes& prompt_logprobs,
                  const nb::bytes& opened, const nb::bytes& ahead) {
  Frame frame(version, /*num_fields=*/28, kind);
  frame.Add(static_cast<std::uint64_t>(plan.step_id));
  frame.Add(plan.seq_ids);
  frame.Add(plan.num_computed);
  frame.Add(plan.num_new);
  frame.Add(plan.token_ids);
  frame.Add(plan.num_blocks);
  frame.Add(plan.block_tables);
  frame.Add(plan.sampled);
  frame.Add(plan.temperature);
  frame.Add(plan.top_k);
  frame.Add(plan.top_p);
  frame.Add(plan.min_p);
  frame.Add(plan.seed);
  frame.Add(plan.position);
  frame.Add(plan.banned);
  frame.AddPacked(images);
  frame.Add(plan.forced);
  frame.Add(plan.logprobs);
  frame.AddPacked(prompt_logprobs);
  frame.Add(plan.structured);
  frame.Add(plan.drafts_wanted);
  frame.AddPacked(opened);
  frame.Add(plan.closed);
  frame.Add(plan.state_slots);
  frame.Add(plan.state_from);
  frame.Add(plan.tail_ids);
  frame.Add(plan.position_shifts);
  frame.AddPacked(ahead);
  return frame.ToBytes();
}

}  // namespace

void BindStepPlan(nb::module_& m) {
  BindOpened(m);
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
      .def_ro("banned", &StepPlan::banned, "Sampled position -> token ids with no probability.")
      .def_prop_ro(
          "images", [](const StepPlan& self) { return Images(self); },
          "(seq_id, image_index, embed_start, embed_count) of each image touched, in token order.")
      .def_prop_ro(
          "ahead", [](const StepPlan& self) { return Ahead(self); },
          "(seq_id, image_index) of each image to be encoded for later steps.")
      .def_prop_ro(
          "prompt_logprobs", [](const StepPlan& self) { return PromptRows(self); },
          "(row, start, k, targets) as in messages.PromptLogprobRow.")
      .def_ro("opened", &StepPlan::opened, "Sequences that the sampler must know more of.")
      .def_prop_ro("is_plain", &IsPlain,
                   "Whether `images`, `ahead`, `prompt_logprobs` and `opened` are all empty.")
      .def("frame", &ToFrame, nb::arg("version"), nb::arg("kind"), nb::arg("images"),
           nb::arg("prompt_logprobs"), nb::arg("opened"), nb::arg("ahead"),
           "The frame of a messages.StepPlan; the four lists come packed.");
  DefColumn<&StepPlan::seq_ids>(cls, "seq_ids", "u64 [num_seqs]");
  DefColumn<&StepPlan::num_computed>(cls, "num_computed", "i32 [num_seqs]");
  DefColumn<&StepPlan::num_new>(cls, "num_new", "i32 [num_seqs]");
  DefColumn<&StepPlan::token_ids>(cls, "token_ids", "i32 [num_tokens]");
  DefColumn<&StepPlan::num_blocks>(cls, "num_blocks", "i32 [num_seqs]: length of each table");
  DefColumn<&StepPlan::block_tables>(cls, "block_tables", "i32 [sum(num_blocks)]");
  DefColumn<&StepPlan::sampled>(cls, "sampled",
                                "u8 [num_seqs]: so many of its last tokens are sampled");
  DefColumn<&StepPlan::temperature>(cls, "temperature", "f32 [num_sampling]");
  DefColumn<&StepPlan::top_k>(cls, "top_k", "i32 [num_sampling]");
  DefColumn<&StepPlan::top_p>(cls, "top_p", "f32 [num_sampling]");
  DefColumn<&StepPlan::min_p>(cls, "min_p", "f32 [num_sampling]");
  DefColumn<&StepPlan::seed>(cls, "seed", "u64 [num_sampling]");
  DefColumn<&StepPlan::position>(cls, "position",
                                 "i64 [num_sampling]: in the output, of the first");
  DefColumn<&StepPlan::forced>(cls, "forced", "i32 [num_positions], or empty; -1: none");
  DefColumn<&StepPlan::logprobs>(cls, "logprobs", "i32 [num_sampling], or empty; -1: none");
  DefColumn<&StepPlan::structured>(cls, "structured", "u8 [num_sampling], or empty");
  DefColumn<&StepPlan::drafts_wanted>(cls, "drafts_wanted", "i32 [num_sampling], or empty");
  DefColumn<&StepPlan::closed>(cls, "closed", "u64: opened before, and ended; before `opened`");
  DefColumn<&StepPlan::state_slots>(cls, "state_slots", "i32 [num_seqs], or empty");
  DefColumn<&StepPlan::state_from>(cls, "state_from", "i32 [num_seqs], or empty; -1: none");
  DefColumn<&StepPlan::tail_ids>(cls, "tail_ids", "i32 [num_seqs * tail_tokens]; -1: none");
  DefColumn<&StepPlan::position_shifts>(cls, "position_shifts", "i32 [num_seqs], or empty");
}

}  // namespace airside
