#pragma once

#include <nanobind/nanobind.h>

namespace mooncache::python {

void bind_hash(nanobind::module_& m);
void bind_index(nanobind::module_& m);
void bind_reuse(nanobind::module_& m);
void bind_store(nanobind::module_& m);
void bind_objects(nanobind::module_& m);
void bind_client(nanobind::module_& m);
void bind_gpu(nanobind::module_& m);
void bind_probe(nanobind::module_& m);
void bind_transfer(nanobind::module_& m);

}  // namespace mooncache::python
