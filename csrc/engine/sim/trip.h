#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "engine/config.h"
#include "engine/image.h"
#include "engine/outbox.h"
#include "engine/request.h"
#include "engine/sim/fake_model.h"
#include "engine/sim/fake_worker.h"
#include "engine/types.h"

namespace airside::sim {

// One picture of a request.
struct Picture {
  std::uint64_t content = 0;
  bool is_fetched = false;  // its hash is known with its shape, and not before
  ImageShape shape;
  bool shape_known = false;
  bool ready = false;
  bool encoded = false;  // in this launch of the workers
};

// A live request as its client sees it: it knows what the fake model makes of it alone, and throws
// std::logic_error on anything else.
class Trip {
 public:
  Trip(Request request, std::vector<Picture> pictures, const EngineConfig& config);

  const Request& request() const { return request_; }
  const std::vector<Picture>& pictures() const { return pictures_; }

  // The prompt, with its expansions once all shapes are known, and what was made after it.
  const std::vector<TokenId>& tokens() const { return tokens_; }
  std::int32_t num_prompt_tokens() const { return num_prompt_tokens_; }
  std::int32_t num_made() const {
    return static_cast<std::int32_t>(tokens_.size()) - num_prompt_tokens_;
  }
  std::vector<TokenId> Made() const { return {tokens_.end() - num_made(), tokens_.end()}; }

  bool ShapesKnown() const;
  // How many positions fewer than tokens the pictures take that end before a place.
  std::int32_t PositionShift(std::int32_t position) const;
  // Whether it certainly has something to compute, if it was never admitted.
  bool MayMove() const {
    return ShapesKnown() && (pictures_.empty() || (pictures_[0].ready && pictures_[0].encoded)) &&
           (!request_.structured || grammar_ready);
  }
  Passenger AsPassenger() const;

  // Whether, of two of the same priority and user, this one is due first.
  bool IsDueBefore(const Trip& other) const;

  // False: that was known.
  bool SetShape(int index);
  bool SetReady(int index);

  // The workers encode it, and forget all when they are lost.
  void Encode(int index) { pictures_[index].encoded = true; }
  void ForgetEncoded() {
    for (Picture& picture : pictures_) picture.encoded = false;
  }

  // The tokens that the model will make of it alone, at most so many.
  std::vector<TokenId> Foresee(std::size_t count) const;

  // Whether a row that ends here would leave a part of a picture to another: its image tokens that
  // follow one another, if such are computed in one step.
  bool SplitsPicture(std::int32_t end) const;
  std::int32_t LongestWholePicture() const;

  // What the client does, or is done to it.
  void Abort() { aborted_ = true; }
  void FailVision() { vision_failed_ = true; }
  void FailGrammar() { grammar_failed_ = true; }
  void StopAt(std::int64_t num_tokens) { stopped_at_ = num_tokens; }

  // What the client is told. `words`: records, one for the token, or of the next prompt positions.
  void TakeToken(TokenId token, std::span<const std::uint32_t> words);
  void TakePromptRecords(std::span<const std::uint32_t> words);
  void TakeFinish(const Finish& finish, Seconds now);

  // Kept here for the world.
  bool was_admitted = false;
  bool grammar_opened = false;  // in this launch of the workers
  bool grammar_ready = false;   // likewise
  std::int32_t num_overtaken = 0;

 private:
  void ExpandPrompt();
  void Board();
  TokenId NextToken() const;
  std::int64_t LengthMax() const;  // of the output
  bool HasStopped() const;
  bool WouldSample(TokenId token);

  Request request_;
  std::vector<Picture> pictures_;
  const EngineConfig& config_;
  std::vector<TokenId> tokens_;
  std::int32_t num_prompt_tokens_ = 0;
  bool boarded_ = false;  // what follows is of all tokens so far
  Prefix prefix_;
  Digest state_ = 0;
  Digest history_ = 0;
  std::vector<Prefix> prompt_prefixes_;  // after each prompt token
  std::int32_t num_prompt_records_ = 0;
  bool aborted_ = false;
  bool vision_failed_ = false;
  bool grammar_failed_ = false;
  std::optional<std::int64_t> stopped_at_;
};

}  // namespace airside::sim
