// What bind_client.cpp, bind_buffers.cpp and bind_reservation.cpp need of each other.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
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

// What calls count for their caller (CallOptions::staged_bytes).
struct StagedTally {
  std::atomic<uint64_t> bytes{0};
};

// What Python gets, as the stub declares it. A node is None where no node answered.
using NodeIndex = std::optional<uint32_t>;
// (code, node, whether the call made a copy) of each block.
using PutAnswers = nanobind::typed<nanobind::list, nanobind::typed<nanobind::tuple, int, NodeIndex, bool>>;
// (code, bytes, node) of each block.
using GetAnswers =
    nanobind::typed<nanobind::list, nanobind::typed<nanobind::tuple, int, uint64_t, NodeIndex>>;

inline nanobind::object node_or_none(uint32_t index) {
  return index == kNoNode ? nanobind::none() : nanobind::cast(index);
}
PutAnswers answers(std::span<const PutOutcome> outcomes);
GetAnswers answers(std::span<const GetOutcome> outcomes);

void bind_buffers(nanobind::module_& m, nanobind::class_<Client>& client);
void bind_watch(nanobind::module_& m, nanobind::class_<Client>& client);
void bind_reservations(nanobind::module_& m, nanobind::class_<Client>& client);

}  // namespace mooncache::python
