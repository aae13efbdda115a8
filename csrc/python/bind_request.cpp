#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <map>
#include <new>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/request.h"
#include "python/bindings.h"
#include "python/columns.h"

namespace nb = nanobind;

namespace airside {
namespace {

std::vector<std::optional<ImageHash>> ToHashes(const std::vector<nb::bytes>& hashes) {
  std::vector<std::optional<ImageHash>> converted;
  for (const nb::bytes& hash : hashes) converted.push_back(ToHash(hash));
  return converted;
}

void BindRejection(nb::module_& m) {
  nb::class_<Rejection>(m, "Rejection", "Why a request was not taken in; see messages.Rejected.")
      .def_prop_ro(
          "code", [](const Rejection& self) { return Name(self.code); },
          "\"duplicate_id\", \"invalid\", \"context_exceeded\", \"pool_exceeded\" or "
          "\"queue_full\".")
      .def_ro("detail", &Rejection::detail, "A sentence with the numbers.");
}

}  // namespace

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
             float top_p, float min_p, std::uint64_t seed, std::string user, std::string cache_salt,
             const std::vector<nb::bytes>& image_hashes, float repetition_penalty,
             float presence_penalty, float frequency_penalty, std::map<TokenId, float> logit_bias,
             std::vector<TokenId> allowed_token_ids, std::int32_t logprobs,
             std::int32_t prompt_logprobs, bool structured, std::optional<std::int32_t> drafts_max,
             const nb::bytes& golden_tokens, std::string_view golden_mode,
             double golden_acceptance) {
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
                                            .seed = seed},
                               .user = std::move(user),
                               .cache_salt = std::move(cache_salt),
                               .image_hashes = ToHashes(image_hashes),
                               .logit_rules = {.repetition_penalty = repetition_penalty,
                                               .presence_penalty = presence_penalty,
                                               .frequency_penalty = frequency_penalty,
                                               .bias = std::move(logit_bias),
                                               .allowed = std::move(allowed_token_ids)},
                               .logprobs = logprobs,
                               .prompt_logprobs = prompt_logprobs,
                               .structured = structured,
                               .drafts_max = drafts_max,
                               .golden = {.tokens = FromBytes<TokenId>(golden_tokens),
                                          .mode = ParseGoldenMode(golden_mode),
                                          .acceptance = golden_acceptance}};
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
          nb::arg("user") = "", nb::arg("cache_salt") = "",
          nb::arg("image_hashes") = std::vector<nb::bytes>{},
          nb::arg("repetition_penalty") = defaults.logit_rules.repetition_penalty,
          nb::arg("presence_penalty") = defaults.logit_rules.presence_penalty,
          nb::arg("frequency_penalty") = defaults.logit_rules.frequency_penalty,
          nb::arg("logit_bias") = std::map<TokenId, float>{},
          nb::arg("allowed_token_ids") = std::vector<TokenId>{},
          nb::arg("logprobs") = defaults.logprobs,
          nb::arg("prompt_logprobs") = defaults.prompt_logprobs,
          nb::arg("structured") = defaults.structured, nb::arg("drafts_max") = nb::none(),
          nb::arg("golden_tokens") = nb::bytes(""), nb::arg("golden_mode") = "",
          nb::arg("golden_acceptance") = defaults.golden.acceptance,
          "`client` says which front end asks; outputs are grouped by it. `token_ids` and "
          "`golden_tokens` are i32; each of `image_hashes` has 16 bytes, or none where "
          "`set_shape` tells them; without any, pictures are shared with nobody. `structured`: a "
          "grammar that the workers keep restricts the "
          "output, which waits for `set_grammar_ready`.\n\n"
          "Raises ValueError on a column or hash of the wrong size, and on an unknown "
          "`golden_mode`.")
      .def_prop_ro(
          "client", [](const Request& self) { return static_cast<std::int64_t>(self.client); },
          "The front end that asks.")
      .def_prop_ro(
          "seq_id", [](const Request& self) { return static_cast<std::uint64_t>(self.seq_id); },
          "The sequence's id.");
  BindRejection(m);
}

}  // namespace airside
