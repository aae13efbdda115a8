// The engine's rules for images whose pixels are in: when they are encoded, and may be read.
//
// Encoding one can take as long as several decodes, and so can the chunk that reads it. Where
// somebody decodes, and waits for both, they are done in different steps. While nobody does, the
// step that reads an image encodes it.

#include <algorithm>
#include <cstddef>

#include "engine/engine.h"

namespace airside {
namespace {

// Of replies of 16 tokens a sixteenth ends in each step. With as many images the batch stays full.
constexpr std::int32_t kDecodesPerImage = 16;

}  // namespace

// The pixels are in, or the workers have lost all that they had encoded.
void Engine::AwaitEncoder(Sequence& sequence, std::int32_t image_index) {
  Image& image = sequence.input.images[image_index];
  image.is_encoded = false;
  if (image.state != Image::State::kReady) return;
  if (config_.MayEncodeAhead()) {
    images_.Add(sequence, image_index);
  } else {
    image.is_encoded = true;
  }
}

// Those that rows of the step which is planned now may read: all, or what the cache has anyhow.
std::vector<EncodeQueue::Entry> Engine::TakeReadable(std::int32_t num_decodes) {
  if (num_decodes == 0) return images_.TakeAll();
  return images_.TakeIf([&](const EncodeQueue::Entry& entry) {
    return scheduler_.Finds(*entry.sequence, entry.image().end);
  });
}

void Engine::LetRead(std::span<const EncodeQueue::Entry> images) {
  for (const EncodeQueue::Entry& entry : images) {
    Sequence& sequence = *entry.sequence;
    const bool waits = sequence.status() == Status::kWaiting;
    if (waits) scheduler_.Withdraw(sequence);
    entry.image().is_encoded = true;
    if (waits) scheduler_.Enqueue(sequence);
  }
}

// There was no room for a row, so they wait for another step.
void Engine::HoldBackUnread(std::span<const EncodeQueue::Entry> images) {
  for (const EncodeQueue::Entry& entry : images) {
    if (entry.IsRead()) continue;
    Sequence& sequence = *entry.sequence;
    const bool waits = sequence.status() == Status::kWaiting;
    if (waits) scheduler_.Withdraw(sequence);
    AwaitEncoder(sequence, entry.image_index);
    if (waits) scheduler_.Enqueue(sequence);
    scheduler_.ParkIfIdle(sequence);
  }
}

// What the step that has just been planned encodes beside its rows, for steps after it.
std::vector<ImageId> Engine::EncodeAhead(std::int32_t num_decodes) {
  const auto images = images_.TakeAhead(std::max(num_decodes / kDecodesPerImage, 1));
  LetRead(images);
  std::vector<ImageId> ids;
  for (const EncodeQueue::Entry& entry : images) ids.push_back(entry.id());
  return ids;
}

// Whether somebody could move at once, since nobody decodes, but for an image that is not encoded.
bool Engine::WaitsForNothingElse() const {
  const auto could_move = [](const EncodeQueue::Entry& entry) {
    return entry.sequence->Schedulable(/*as_if_encoded=*/true);
  };
  const auto waiting = images_.waiting();
  return scheduler_.NumDecodes() == 0 && std::any_of(waiting.begin(), waiting.end(), could_move);
}

}  // namespace airside
