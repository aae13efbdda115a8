// Bindings without logic: what the core takes and gives, in Python's words.

#include <nanobind/nanobind.h>

#include "python/bindings.h"

NB_MODULE(_core, m) {
  m.doc() = "The engine core: decides, step by step, what the model computes next.";
  airside::BindConfig(m);
  airside::BindRequest(m);
  airside::BindStepPlan(m);
  airside::BindOutputs(m);
  airside::BindEngine(m);
}
