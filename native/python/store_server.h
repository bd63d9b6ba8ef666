// Parts of the class StoreServer that have files of their own.
#pragma once

#include <nanobind/nanobind.h>

#include "mooncache/server.h"

namespace mooncache::python {

void bind_writers(nanobind::class_<StoreServer>& server);
void bind_cluster_map(nanobind::class_<StoreServer>& server);

}  // namespace mooncache::python
