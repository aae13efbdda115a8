#pragma once

#include <nanobind/nanobind.h>

namespace airside {

// Each adds the classes of one file to the module; in this order, since the later ones name the
// earlier.
void BindConfig(nanobind::module_& m);
void BindRequest(nanobind::module_& m);  // and Rejection
void BindStepPlan(nanobind::module_& m);
void BindOutputs(nanobind::module_& m);  // and Stats
void BindEngine(nanobind::module_& m);

}  // namespace airside
