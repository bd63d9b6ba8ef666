// Reservations for Python: one block, and many of one size.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <optional>
#include <utility>
#include <vector>

#include "client_arguments.h"
#include "client_buffers.h"

namespace mooncache::python {

namespace {

// The client's connect timeout ends it sooner.
constexpr double kAbortTimeoutS = 30.0;

void write_range(BlockReservation& reservation, uint64_t offset, nb::handle source, double timeout_s,
                 const CancelToken* cancel) {
  const CallOptions options = to_options(timeout_s, cancel, std::nullopt);
  Buffers buffers;
  std::vector<ConstSlice> slices;
  add_slices(buffers, source, false, slices);
  check(interruptible([&] { return reservation.write(offset, slices, options); }));
}

void bind_reservation(nb::module_& m) {
  nb::class_<BlockReservation>(
      m, "Reservation",
      "Space for one block on a node, filled range by range. Errors: RuntimeError(code, name, message).")
      .def("write", &write_range, nb::arg("offset"), nb::arg("source"), nb::arg("timeout_s") = 30.0,
           nb::arg("cancel").none() = nb::none(), "Write a buffer, or a list of buffers, at a byte offset.")
      .def(
          "commit",
          [](BlockReservation& reservation, double timeout_s, const CancelToken* cancel) {
            const CallOptions options = to_options(timeout_s, cancel, std::nullopt);
            check(interruptible([&] { return reservation.commit(options); }));
          },
          nb::arg("timeout_s") = 30.0, nb::arg("cancel").none() = nb::none(),
          "Make the block visible; every byte must be written.")
      .def("abort",
           [](BlockReservation& reservation) {
             const CallOptions options = to_options(kAbortTimeoutS, nullptr, std::nullopt);
             check(interruptible([&] { return reservation.abort(options); }));
           })
      .def_prop_ro("size_bytes", &BlockReservation::size)
      .def_prop_ro("node_index", &BlockReservation::node_index);
}

using Codes = nb::typed<nb::list, int>;

Codes to_list(std::span<const Code> codes) {
  nb::list list;
  for (const Code code : codes) list.append(static_cast<int>(code));
  return list;
}

// For each block of the batch a buffer, or a list of them, which may be empty.
Codes write_batch(ReservationBatch& batch, uint64_t offset, nb::handle sources_in, double timeout_s,
                  const CancelToken* cancel, StagedTally* tally) {
  CallOptions options = to_options(timeout_s, cancel, std::nullopt);
  if (tally != nullptr) options.staged_bytes = &tally->bytes;
  const Batch<ConstSlice> sources(sources_in, batch.size(), false, "sources");
  std::vector<std::span<const ConstSlice>> parts;
  for (size_t i = 0; i < batch.size(); ++i) parts.push_back(sources.of(i));
  std::vector<Code> codes(batch.size());
  check(interruptible([&] { return batch.write(offset, parts, options, codes); }));
  return to_list(codes);
}

uint64_t to_number(nb::handle object, const char* what) {
  uint64_t number = 0;
  if (!nb::try_cast(object, number)) refuse(std::string(what) + " must be whole numbers, 0 or more");
  return number;
}

// Ranges of one buffer: block i has those that begin at places[i] * step_bytes. One look at the buffer serves
// all blocks, where a buffer for each range costs more than the bytes of a layer.
std::vector<ConstSlice> gathered(const Slice& buffer, nb::handle places, uint64_t step_bytes,
                                 nb::handle ranges, std::vector<size_t>& ends) {
  std::vector<std::pair<uint64_t, uint64_t>> parts;
  for (nb::handle range : ranges) {
    parts.emplace_back(to_number(range[0], "ranges"), to_number(range[1], "ranges"));
  }
  std::vector<ConstSlice> slices;
  for (nb::handle place : places) {
    if (!place.is_none()) {
      const uint64_t number = to_number(place, "places");
      const bool far = step_bytes != 0 && number > buffer.size / step_bytes;
      for (const auto& [at, size] : parts) {
        const uint64_t begin = far ? UINT64_MAX : number * step_bytes;
        if (far || begin > buffer.size || at > buffer.size - begin || size > buffer.size - begin - at)
          refuse("a range of place " + std::to_string(number) + " is not inside the buffer");
        slices.push_back({buffer.data + begin + at, static_cast<size_t>(size)});
      }
    }
    ends.push_back(slices.size());
  }
  return slices;
}

Codes write_gathered(ReservationBatch& batch, uint64_t offset, nb::handle buffer_in, nb::list places,
                     uint64_t step_bytes, nb::list ranges, double timeout_s, const CancelToken* cancel,
                     StagedTally* tally) {
  CallOptions options = to_options(timeout_s, cancel, std::nullopt);
  if (tally != nullptr) options.staged_bytes = &tally->bytes;
  Buffers buffers;
  std::vector<size_t> ends;
  const auto slices = gathered(buffers.add(buffer_in, false), places, step_bytes, ranges, ends);
  if (ends.size() != batch.size()) refuse("as many places as blocks are needed");
  std::vector<std::span<const ConstSlice>> parts;
  for (size_t i = 0, begin = 0; i < ends.size(); begin = ends[i++])
    parts.push_back(std::span(slices).subspan(begin, ends[i] - begin));
  std::vector<Code> codes(batch.size());
  check(interruptible([&] { return batch.write(offset, parts, options, codes); }));
  return to_list(codes);
}

void bind_reservation_batch(nb::module_& m) {
  const auto timeout = nb::arg("timeout_s") = 30.0;
  const auto cancel = nb::arg("cancel").none() = nb::none();
  nb::class_<ReservationBatch>(
      m, "ReservationBatch",
      "Space for blocks of one size, filled range by range. Calls answer a code for each block.")
      .def("write", &write_batch, nb::arg("offset"), nb::arg("sources"), timeout, cancel,
           nb::arg("tally").none() = nb::none(),
           "For each block a buffer, or a list of buffers (empty: nothing), to write at the byte offset -> "
           "codes")
      .def("write_gathered", &write_gathered, nb::arg("offset"), nb::arg("buffer"), nb::arg("places"),
           nb::arg("step_bytes"), nb::arg("ranges"), timeout, cancel, nb::arg("tally").none() = nb::none(),
           "For each block ranges (offset, bytes) of one buffer, from its place * step_bytes on (None: "
           "nothing) "
           "-> codes")
      .def(
          "commit",
          [](ReservationBatch& batch, double timeout_s, const CancelToken* token) -> Codes {
            const CallOptions options = to_options(timeout_s, token, std::nullopt);
            std::vector<Code> codes(batch.size());
            check(interruptible([&] { return batch.commit(options, codes); }));
            return to_list(codes);
          },
          timeout, cancel, "Make the blocks visible of which every byte was written -> codes")
      .def("abort",
           [](ReservationBatch& batch) {
             const CallOptions options = to_options(kAbortTimeoutS, nullptr, std::nullopt);
             check(interruptible([&] { return batch.abort(options); }));
           })
      .def("__len__", &ReservationBatch::size)
      .def_prop_ro("block_bytes", &ReservationBatch::block_bytes)
      .def_prop_ro(
          "codes",
          [](const ReservationBatch& batch) -> Codes {
            nb::list list;
            for (size_t i = 0; i < batch.size(); ++i) list.append(static_cast<int>(batch.code(i)));
            return list;
          },
          "0 for blocks that can be written")
      .def_prop_ro("nodes",
                   [](const ReservationBatch& batch) -> nb::typed<nb::list, std::optional<uint32_t>> {
                     nb::list list;
                     for (size_t i = 0; i < batch.size(); ++i) list.append(node_or_none(batch.node_index(i)));
                     return list;
                   });
}

}  // namespace

void bind_reservations(nb::module_& m, nb::class_<Client>& c) {
  const auto cancel = nb::arg("cancel").none() = nb::none();
  const auto node = nb::arg("node").none() = nb::none();
  bind_reservation(m);
  bind_reservation_batch(m);
  c.def(
      "reserve",
      [](Client& client, nb::handle key, uint64_t size, double timeout_s, const CancelToken* token,
         std::optional<uint32_t> on) {
        const auto keys = to_keys(key);
        if (keys.size() != 1) refuse("one key of 32 bytes is needed");
        const CallOptions options = to_options(timeout_s, token, on);
        return value_or_raise(interruptible([&] { return client.reserve(keys[0], size, options); }));
      },
      nb::arg("key"), nb::arg("size_bytes"), nb::arg("timeout_s") = 30.0, cancel, node);
  c.def(
      "reserve_many",
      [](Client& client, nb::handle keys_in, uint64_t block_bytes, double timeout_s, const CancelToken* token,
         std::optional<uint32_t> on, std::optional<uint32_t> prefer_node) {
        const auto keys = to_keys(keys_in);
        CallOptions options = to_options(timeout_s, token, on);
        options.prefer_node = prefer_node;
        return value_or_raise(
            interruptible([&] { return client.reserve(std::span(keys), block_bytes, options); }));
      },
      nb::arg("keys"), nb::arg("block_bytes"), nb::arg("timeout_s") = 30.0, cancel, node,
      nb::arg("prefer_node").none() = nb::none());
}

}  // namespace mooncache::python
