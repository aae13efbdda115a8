#pragma once

#include <iosfwd>

namespace airside::sim {

// Runs the same load, of which about a third fits the pool at a time, under each victim rule and
// prints, per rule, how much was computed again.
void CompareVictims(std::ostream& out);

}  // namespace airside::sim
