#include <nanobind/nanobind.h>
NB_MODULE(_core, m) { m.doc() = "The engine core."; m.def("ping", [] { return 1; }); }
