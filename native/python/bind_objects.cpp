// ObjectRequests for Python: the calls on an object store that a node wants made, and their ends. Waiting
// releases the GIL; no native thread ever takes it.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstring>
#include <utility>
#include <vector>

#include "buffer_view.h"
#include "calls.h"
#include "module.h"
#include "object_queue.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mooncache::python {
namespace {

nb::object take(ObjectQueue& queue, uint32_t wait_ms) {
  auto taken = without_gil([&] { return queue.requests->take(wait_ms); });
  if (!taken) return nb::none();
  const store::disk::ObjectRequest& request = taken->request;
  return nb::make_tuple(taken->id, static_cast<int>(request.kind), request.name, request.offset, request.size,
                        nb::bytes(reinterpret_cast<const char*>(request.bytes.data()), request.bytes.size()));
}

void complete(ObjectQueue& queue, uint64_t id, int64_t result, nb::handle data) {
  store::disk::ObjectAnswer answer;
  answer.result = result;
  const BufferView view(data);
  const auto bytes = view.bytes();
  without_gil([&] {
    answer.bytes.assign(bytes.begin(), bytes.end());
    queue.requests->complete(id, std::move(answer));
  });
}

void close(ObjectQueue& queue) {
  without_gil([&] { queue.requests->close(); });
}

bool closed(const ObjectQueue& queue) {
  return queue.requests->closed();
}

}  // namespace

void bind_objects(nb::module_& m) {
  nb::class_<ObjectQueue>(
      m, "ObjectRequests",
      "Calls on an object store that a store node wants made. Threads of the owner take and "
      "complete them; the node waits for none longer than its time limit.")
      .def(nb::init<>())
      .def("take", &take, "wait_ms"_a,
           nb::sig("def take(self, wait_ms: int) -> tuple[int, int, str, int, int, bytes] | None"),
           "The next call: id, kind (0 list, 1 read, 2 write, 3 delete), name, offset, size, bytes to write. "
           "None "
           "when there is none within the time, or after close().")
      .def("complete", &complete, "id"_a, "result"_a, "data"_a,
           nb::sig("def complete(self, id: int, result: int, data: object) -> None"),
           "Ends a call: 0 or a negative errno, and the bytes that it has read. A list is for each object: "
           "length "
           "of the name (u16), name, size (u64), a number that changes with its bytes (u64), little endian.")
      .def("close", &close, "Ends every call, those that are asked later, too.")
      .def_prop_ro("closed", &closed, "Whether close() was called.");
}

}  // namespace mooncache::python
