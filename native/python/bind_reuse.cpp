// The store's policy "mooncache" alone, so that tests hold it against the simulator's.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <vector>

#include "buffer_view.h"
#include "module.h"
#include "store/reuse.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mooncache::python {
namespace {

using store::Reuse;

void seen(Reuse& policy, const std::vector<uint64_t>& blocks, double now_s, nb::handle here) {
  const BufferView view(here);
  const auto bytes = view.bytes();
  std::vector<uint8_t> bitmap;
  for (const std::byte byte : bytes) bitmap.push_back(static_cast<uint8_t>(byte));
  policy.seen(blocks, now_s, bitmap);
}

nb::object victim(Reuse& policy, double now_s, std::optional<uint64_t> incoming) {
  const auto found = policy.victim(now_s, incoming);
  if (!found) return nb::none();
  return nb::make_tuple(found->id, found->worth);
}

std::string check(const Reuse& policy) {
  std::string why;
  return policy.check(&why) ? std::string() : why;
}

}  // namespace

void bind_reuse(nb::module_& m) {
  nb::class_<Reuse>(m, "Reuse",
                    "The store nodes' eviction policy \"mooncache\", for tests: one thread, ids for blocks.")
      .def(
          "__init__",
          [](Reuse* self, uint32_t chains_max, uint64_t start_uses) {
            if (chains_max == 0) throw nb::value_error("chains_max must be at least 1");
            new (self) Reuse({chains_max, start_uses});
          },
          "chains_max"_a = store::ReuseLimits{}.chains_max, "start_uses"_a = store::ReuseLimits{}.start_uses)
      .def("seen", &seen, "blocks"_a, "now_s"_a, "here"_a = nb::bytes("", 0),
           "A chain was asked for. Bit at % 8 of byte at / 8 of here: blocks[at] is stored.")
      .def("stored", &Reuse::stored, "block"_a, "now_s"_a)
      .def("discard", &Reuse::discard, "block"_a)
      .def("set_aside", &Reuse::set_aside, "block"_a)
      .def("victim", &victim, "now_s"_a, "incoming"_a = nb::none(),
           nb::sig("def victim(self, now_s: float, incoming: int | None = None) -> tuple[int, float] | None"),
           "(block, worth) of what should go next, None when no block is known.")
      .def("__contains__", &Reuse::knows, "block"_a)
      .def("__len__", &Reuse::blocks)
      .def_prop_ro("chains", &Reuse::chains)
      .def_prop_ro("memory_bytes", &Reuse::memory_bytes)
      .def("check", &check, "Empty when every invariant holds, else the first broken one.");
}

}  // namespace mooncache::python
