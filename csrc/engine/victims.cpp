#include "engine/victims.h"

#include <algorithm>
#include <cstddef>
#include <limits>

namespace airside {

std::vector<Sequence*> Victims::Choose(std::span<Sequence* const> idle,
                                       std::span<Sequence* const> others, int blocks_missing) {
  std::vector<Sequence*> victims;
  for (auto it = idle.rbegin(); it != idle.rend() && blocks_missing > 0; ++it) {
    Take(**it, victims, blocks_missing);
  }
  std::vector<Sequence*> left(others.rbegin(), others.rend());  // of equals, the last in order
  while (blocks_missing > 0 && !left.empty()) {
    std::size_t cheapest = 0;
    double least = std::numeric_limits<double>::infinity();
    for (std::size_t i = 0; i < left.size(); ++i) {
      const double cost = CostOf(*left[i], blocks_missing);
      if (cost < least) {
        least = cost;
        cheapest = i;
      }
      if (rule_ == VictimRule::kLast) break;
    }
    Take(*left[cheapest], victims, blocks_missing);
    left.erase(left.begin() + static_cast<std::ptrdiff_t>(cheapest));
  }
  Spare(victims, -blocks_missing);
  for (const Sequence* victim : victims) CountTaken(*victim, -1);
  if (blocks_missing > 0) victims.clear();
  return victims;
}

// Lets those go, the ones chosen last first, without whom there is enough: all of whose blocks
// others have too, or who were chosen before one that brings more.
void Victims::Spare(std::vector<Sequence*>& victims, int blocks_to_spare) {
  for (std::size_t i = victims.size(); i-- > 0 && blocks_to_spare >= 0;) {
    const auto& blocks = victims[i]->cache.blocks;
    const auto brought =
        static_cast<int>(std::count_if(blocks.begin(), blocks.end(), [&](BlockId block) {
          return blocks_.References(block) == num_taken_[static_cast<std::size_t>(block)];
        }));
    if (brought > blocks_to_spare) continue;
    blocks_to_spare -= brought;
    CountTaken(*victims[i], -1);
    victims.erase(victims.begin() + static_cast<std::ptrdiff_t>(i));
  }
}

int Victims::Gain(const Sequence& candidate) const {
  const auto& blocks = candidate.cache.blocks;
  return static_cast<int>(std::count_if(blocks.begin(), blocks.end(), [&](BlockId block) {
    return blocks_.References(block) == num_taken_[static_cast<std::size_t>(block)] + 1;
  }));
}

// Least waste, in tokens to compute again per block that is gained and needed. What others share is
// not lost. What is in the prefix cache stays there until it is taken, so it costs one block of
// tokens for each, whoever gives it; among those the last in order goes, who would be the last to
// find it again. The rest is lost as a whole, however little of it is needed.
double Victims::CostOf(const Sequence& candidate, int blocks_missing) const {
  if (rule_ == VictimRule::kMostOutput) return -candidate.NumMade();
  const Sequence::Cache& cache = candidate.cache;
  const int gain = Gain(candidate);
  if (gain == 0) return std::numeric_limits<double>::max();
  const auto kept = static_cast<std::int32_t>(cache.blocks.size()) - gain;
  if (cache.num_published > kept) return blocks_.block_size();
  const std::int32_t lost = candidate.NumPlanned() - kept * blocks_.block_size();
  return static_cast<double>(lost) / std::min(gain, blocks_missing);
}

void Victims::Take(Sequence& victim, std::vector<Sequence*>& victims, int& blocks_missing) {
  blocks_missing -= Gain(victim);
  CountTaken(victim, 1);
  victims.push_back(&victim);
}

void Victims::CountTaken(const Sequence& victim, int change) {
  for (const BlockId block : victim.cache.blocks) {
    num_taken_[static_cast<std::size_t>(block)] += change;
  }
}

}  // namespace airside
