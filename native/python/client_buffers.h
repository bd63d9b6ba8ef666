// What bind_client.cpp needs of bind_buffers.cpp.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/unique_ptr.h>

#include <memory>
#include <optional>
#include <utility>

#include "calls.h"
#include "mooncache/client.h"

namespace mooncache::python {

struct Received {
  std::unique_ptr<LentBuffer> lent;
};

CallOptions to_options(double timeout_s, const CancelToken* cancel, std::optional<uint32_t> node);

// A call with such options: without the GIL. Raises what a signal handler raised meanwhile.
template <typename Work>
auto interruptible(Work work) {
  auto result = without_gil(work);
  if (PyErr_Occurred() != nullptr) throw nanobind::python_error();
  return result;
}

// (code, node) of each block.
nanobind::list answers(std::span<const PutOutcome> outcomes);
// (code, bytes, node) of each block.
nanobind::list answers(std::span<const GetOutcome> outcomes);

void bind_buffers(nanobind::module_& m, nanobind::class_<Client>& client);

}  // namespace mooncache::python
