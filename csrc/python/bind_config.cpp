#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string_view.h>

#include <cstdint>
#include <new>
#include <optional>
#include <string_view>

#include "engine/config.h"
#include "python/bindings.h"

namespace nb = nanobind;

namespace airside {

void BindConfig(nb::module_& m) {
  const EngineConfig defaults;
  nb::class_<EngineConfig>(m, "EngineConfig", "The limits and habits of an engine.")
      .def(
          "__init__",
          [](EngineConfig* self, int num_blocks, int block_size, int max_num_seqs,
             int max_num_batched_tokens, int max_model_len, bool enable_chunked_prefill,
             bool prefill_first, bool strict_fifo, std::string_view preemption,
             std::string_view victim_rule, bool enable_prefix_caching, bool async_scheduling,
             std::string_view draft_method, int max_draft_tokens, int num_state_slots,
             int tail_tokens, std::optional<TokenId> image_token_id, int max_queued_requests,
             std::int64_t max_queued_tokens, std::optional<TokenId> vocab_size,
             std::optional<TokenId> image_mark_id, bool atomic_images, int max_num_mixed_tokens) {
            new (self) EngineConfig{.num_blocks = num_blocks,
                                    .block_size = block_size,
                                    .max_num_seqs = max_num_seqs,
                                    .max_num_batched_tokens = max_num_batched_tokens,
                                    .max_num_mixed_tokens = max_num_mixed_tokens,
                                    .max_model_len = max_model_len,
                                    .enable_chunked_prefill = enable_chunked_prefill,
                                    .prefill_first = prefill_first,
                                    .strict_fifo = strict_fifo,
                                    .preemption = ParsePreemptionPolicy(preemption),
                                    .victim_rule = ParseVictimRule(victim_rule),
                                    .enable_prefix_caching = enable_prefix_caching,
                                    .async_scheduling = async_scheduling,
                                    .draft_method = ParseDraftMethod(draft_method),
                                    .max_draft_tokens = max_draft_tokens,
                                    .num_state_slots = num_state_slots,
                                    .tail_tokens = tail_tokens,
                                    .image_token_id = image_token_id,
                                    .image_mark_id = image_mark_id,
                                    .atomic_images = atomic_images,
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
          nb::arg("preemption") = Name(defaults.preemption),
          nb::arg("victim_rule") = Name(defaults.victim_rule),
          nb::arg("enable_prefix_caching") = defaults.enable_prefix_caching,
          nb::arg("async_scheduling") = defaults.async_scheduling,
          nb::arg("draft_method") = Name(defaults.draft_method),
          nb::arg("max_draft_tokens") = defaults.max_draft_tokens,
          nb::arg("num_state_slots") = defaults.num_state_slots,
          nb::arg("tail_tokens") = defaults.tail_tokens, nb::arg("image_token_id") = nb::none(),
          nb::arg("max_queued_requests") = defaults.max_queued_requests,
          nb::arg("max_queued_tokens") = defaults.max_queued_tokens,
          nb::arg("vocab_size") = nb::none(), nb::arg("image_mark_id") = nb::none(),
          nb::arg("atomic_images") = defaults.atomic_images,
          nb::arg("max_num_mixed_tokens") = defaults.max_num_mixed_tokens,
          "Raises ValueError, naming the first value that makes no sense.")
      .def_ro("num_blocks", &EngineConfig::num_blocks, "KV blocks in the pool.")
      .def_ro("block_size", &EngineConfig::block_size, "Tokens that a block holds.")
      .def_ro("max_num_seqs", &EngineConfig::max_num_seqs,
              "Sequences that run at once, and rows of one step.")
      .def_ro("max_num_batched_tokens", &EngineConfig::max_num_batched_tokens,
              "Tokens of one step.")
      .def_ro(
          "max_num_mixed_tokens", &EngineConfig::max_num_mixed_tokens,
          "Tokens of one step in which somebody decodes, of which prompts get half at the least; "
          "0: as of any step. Without meaning where prompts or images come whole.")
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
      .def_prop_ro(
          "victim_rule", [](const EngineConfig& self) { return Name(self.victim_rule); },
          "Whose blocks are taken, of those behind the taker: \"least_waste\", \"most_output\" or "
          "\"last\".")
      .def_ro("enable_prefix_caching", &EngineConfig::enable_prefix_caching,
              "Whether equal prefixes are computed once.")
      .def_ro("async_scheduling", &EngineConfig::async_scheduling,
              "Whether a step is planned while the one before it is computed.")
      .def_prop_ro(
          "draft_method", [](const EngineConfig& self) { return Name(self.draft_method); },
          "Who proposes draft tokens: \"none\", \"ngram\" (the engine) or \"mtp\" (the worker).")
      .def_ro("max_draft_tokens", &EngineConfig::max_draft_tokens,
              "Draft tokens per sequence and step, of whatever method; golden ones, offered as "
              "drafts, also where the method is \"none\".")
      .def_ro("num_state_slots", &EngineConfig::num_state_slots,
              "Sequences whose fixed-size state the workers can hold; 0: the model has none.")
      .def_ro("tail_tokens", &EngineConfig::tail_tokens, "Tokens before each row in `tail_ids`.")
      .def_ro("image_token_id", &EngineConfig::image_token_id,
              "The token whose positions are image embeddings; None: the model takes no images.")
      .def_ro("image_mark_id", &EngineConfig::image_mark_id,
              "The token that stands for an image in a request; None: the image token.")
      .def_ro("atomic_images", &EngineConfig::atomic_images,
              "Whether an image's tokens that follow one another are computed in one step.")
      .def_ro("max_queued_requests", &EngineConfig::max_queued_requests, "Requests that may wait.")
      .def_ro("max_queued_tokens", &EngineConfig::max_queued_tokens, "Tokens that may wait.")
      .def_ro("vocab_size", &EngineConfig::vocab_size,
              "Token ids are below it; None: they are not checked.");
}

}  // namespace airside
