#include "engine/outbox.h"

#include <utility>

namespace airside {

ClientOutput& Outbox::Of(ClientId client) {
  ClientOutput& output = outputs_[client];
  output.client = client;
  return output;
}

void Outbox::AddToken(ClientId client, SeqId seq_id, TokenId token) {
  ClientOutput& output = Of(client);
  output.seq_ids.push_back(seq_id);
  output.num_tokens.push_back(1);
  output.token_ids.push_back(token);
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
