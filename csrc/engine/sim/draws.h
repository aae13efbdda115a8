#pragma once

#include <cstdint>
#include <vector>

#include "engine/config.h"
#include "engine/image.h"
#include "engine/request.h"
#include "engine/sim/dice.h"
#include "engine/sim/trip.h"

namespace airside::sim {

// A small engine with any combination of features.
EngineConfig DrawConfig(Dice& dice);

// Draws requests for an engine. Many begin like an earlier one, some are the same but for the seed,
// so that there is something to find in the cache.
class RequestDraw {
 public:
  RequestDraw(const EngineConfig& config, Dice& dice) : config_(config), dice_(dice) {}

  Request Next(SeqId seq_id, Seconds now);

  // Those of a request, which has one mark for each; pictures of equal hashes are equal.
  std::vector<Picture> PicturesOf(const Request& request);

 private:
  void DrawTokens(Request& request);
  void DrawPictures(Request& request);
  void DrawLimits(Request& request, Seconds now);
  void DrawRules(Request& request);
  void DrawGolden(Request& request);
  static ImageShape DrawShape(std::uint64_t content);

  const EngineConfig& config_;
  Dice& dice_;
  std::vector<std::vector<TokenId>> stems_;  // earlier prompts, the last few
  std::uint64_t num_pictures_ = 0;           // that are like no other
};

}  // namespace airside::sim
