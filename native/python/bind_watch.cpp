// BlockWatch for Python, and give_up: waiting for blocks that others are about to write.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>

#include <cmath>

#include "client_arguments.h"
#include "client_buffers.h"
#include "mooncache/client.h"

namespace nb = nanobind;

namespace mooncache::python {

namespace {

using News = nb::typed<nb::tuple, nb::str, nb::typed<nb::tuple, uint32_t, nb::ellipsis>, int, int>;
using NewsList = nb::typed<nb::list, News>;

void add(BlockWatch& watch, const std::string& name, nb::handle keys, double timeout_s,
         std::optional<uint32_t> node, double news_s) {
  if (!(news_s >= 0 && news_s < 4e6)) refuse("news_s must be a number of seconds, 0 or more");
  auto packed = to_keys(keys);
  const Deadline deadline = deadline_in(timeout_s);
  // below a millisecond is "as soon as there is any", not "at the end only"
  const auto news_ms = static_cast<uint32_t>(std::ceil(news_s * 1000));
  check(without_gil([&] { return watch.add(name, std::move(packed), deadline, node, news_ms); }));
}

nb::object positions_of(const WatchNews& news) {
  nb::object positions = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(news.positions.size())));
  if (!positions.is_valid()) throw nb::python_error();
  for (size_t i = 0; i < news.positions.size(); ++i) {
    PyObject* const number = PyLong_FromUnsignedLong(news.positions[i]);
    if (number == nullptr) throw nb::python_error();
    PyTuple_SET_ITEM(positions.ptr(), static_cast<Py_ssize_t>(i), number);
  }
  return positions;
}

NewsList next(BlockWatch& watch, double timeout_s) {
  const CallOptions options = to_options(timeout_s, nullptr, std::nullopt);
  const auto all = value_or_raise(interruptible([&] { return watch.next(options); }));
  nb::list list;
  for (const WatchNews& news : all) {
    list.append(nb::make_tuple(news.name, positions_of(news), static_cast<int>(news.state),
                               static_cast<int>(news.code)));
  }
  return list;
}

}  // namespace

void bind_watch(nb::module_& m, nb::class_<Client>& client) {
  nb::class_<BlockWatch>(
      m, "BlockWatch", "Waits for blocks that others are about to write. One thread at a time is in next().")
      .def("add", &add, nb::arg("name"), nb::arg("keys"), nb::arg("timeout_s"),
           nb::arg("node").none() = nb::none(), nb::arg("news_s") = 0.0)
      .def("remove", &BlockWatch::remove, nb::arg("name"), nb::call_guard<nb::gil_scoped_release>(),
           "False: there is no such watch.")
      .def("next", &next, nb::arg("timeout_s"),
           "-> [(name, new positions, state, code)]; state 0: more comes, 1: all, 2: given up, 3: time is "
           "over, 4: unreachable (the code says why)")
      .def("wake", &BlockWatch::wake, nb::call_guard<nb::gil_scoped_release>())
      .def("close", &BlockWatch::close, nb::call_guard<nb::gil_scoped_release>());
  client.def("watch", [](Client& self) { return self.watch(); })
      .def(
          "give_up",
          [](Client& self, nb::handle keys, double timeout_s, std::optional<uint32_t> node) {
            const auto packed = to_keys(keys);
            const CallOptions options = to_options(timeout_s, nullptr, node);
            return value_or_raise(interruptible([&] { return self.give_up(packed, options); }));
          },
          nb::arg("keys"), nb::arg("timeout_s") = 30.0, nb::arg("node").none() = nb::none(),
          "-> waits that ended");
}

}  // namespace mooncache::python
