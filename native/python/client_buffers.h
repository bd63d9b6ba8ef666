// What bind_client.cpp needs of bind_buffers.cpp.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/unique_ptr.h>

#include <memory>
#include <optional>
#include <utility>

#include "mooncache/client.h"

namespace mooncache::python {

struct Received {
  std::unique_ptr<LentBuffer> lent;
};

void bind_buffers(nanobind::module_& m, nanobind::class_<Client>& client);

}  // namespace mooncache::python
