#include "engine/outbox.h"

#include <utility>

namespace airside {

ClientOutput& Outbox::Of(ClientId client) {
  return outputs_.try_emplace(client, ClientOutput{.client = client}).first->second;
}

void Outbox::AddTokens(ClientId client, SeqId seq_id, std::span<const TokenId> tokens,
                       std::span<const std::byte> records) {
  ClientOutput& output = Of(client);
  // The column begins with the first row that has records.
  if (!records.empty() || !output.logprob_sizes.empty()) {
    output.logprob_sizes.resize(output.seq_ids.size(), 0);
    output.logprob_sizes.push_back(static_cast<std::int32_t>(records.size()));
    output.logprobs.insert(output.logprobs.end(), records.begin(), records.end());
  }
  output.seq_ids.push_back(seq_id);
  output.num_tokens.push_back(static_cast<std::int32_t>(tokens.size()));
  output.token_ids.insert(output.token_ids.end(), tokens.begin(), tokens.end());
  output.step_tokens = step_tokens_;
}

void Outbox::AddPromptLogprobs(ClientId client, SeqId seq_id, std::span<const std::byte> records) {
  ClientOutput& output = Of(client);
  output.prompt_seq_ids.push_back(seq_id);
  output.prompt_sizes.push_back(static_cast<std::int32_t>(records.size()));
  output.prompt_logprobs.insert(output.prompt_logprobs.end(), records.begin(), records.end());
}

void Outbox::AddFinish(ClientId client, Finish finish) {
  Of(client).finished.push_back(std::move(finish));
}

std::vector<ClientOutput> Outbox::Take() {
  std::vector<ClientOutput> taken;
  taken.reserve(outputs_.size());
  for (auto& [client, output] : outputs_) taken.push_back(std::move(output));
  outputs_.clear();
  return taken;
}

}  // namespace airside
