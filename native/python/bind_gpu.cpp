// GpuDevice and GpuStager for Python. What calls the driver releases the GIL: it may wait for work of the
// device that itself waits for Python. Slices are lists of (address, size).
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstring>

#include "calls.h"
#include "module.h"
#include "mooncache/gpu.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mooncache::python {
namespace {

using Pairs = std::vector<std::pair<uint64_t, uint64_t>>;

std::vector<DeviceSlice> slices_of(const Pairs& pairs) {
  std::vector<DeviceSlice> slices;
  slices.reserve(pairs.size());
  for (const auto& [address, size] : pairs) slices.push_back({address, size});
  return slices;
}

GpuStager& with(GpuStager& stager, size_t slot) {
  if (slot >= stager.slots()) refuse("there is no such staging buffer");
  return stager;
}

void begin(GpuStager& stager, size_t slot, const Pairs& pairs, const std::vector<uint32_t>& blocks, bool crc,
           bool into) {
  with(stager, slot);
  const auto slices = slices_of(pairs);
  check(without_gil([&] {
    return into ? stager.start_in(slot, slices, blocks, crc) : stager.start_out(slot, slices, blocks, crc);
  }));
}

void bind_stager(nb::module_& m) {
  nb::class_<GpuStager>(m, "GpuStager", "Pinned buffers with a copy stream each. Not thread-safe.")
      .def_prop_ro("slots", &GpuStager::slots)
      .def_prop_ro("how", &GpuStager::how)
      .def(
          "slot",
          [](const GpuStager& stager, size_t number) {
            if (number >= stager.slots()) refuse("there is no such staging buffer");
            const Slice slot = stager.slot(number);
            return nb::make_tuple(reinterpret_cast<uint64_t>(slot.data), slot.size);
          },
          "number"_a, "(address, bytes) of a pinned buffer, valid as long as this object.")
      .def(
          "follow",
          [](GpuStager& s, size_t slot, uint64_t event) {
            with(s, slot);
            check(without_gil([&] { return s.follow(slot, event); }));
          },
          "slot"_a, "event"_a, "What is started next in the slot begins behind this CUDA event (its handle).")
      .def(
          "start_out",
          [](GpuStager& s, size_t slot, const Pairs& slices, const std::vector<uint32_t>& blocks, bool crc) {
            begin(s, slot, slices, blocks, crc, false);
          },
          "slot"_a, "slices"_a, "blocks"_a, "crc"_a = true)
      .def(
          "start_in",
          [](GpuStager& s, size_t slot, const Pairs& slices, const std::vector<uint32_t>& blocks, bool crc) {
            begin(s, slot, slices, blocks, crc, true);
          },
          "slot"_a, "slices"_a, "blocks"_a, "crc"_a = true)
      .def(
          "wait",
          [](GpuStager& s, size_t slot, double timeout_s) {
            with(s, slot);
            const Deadline deadline = deadline_in(timeout_s);
            return value_or_raise(without_gil([&] { return s.wait(slot, deadline); }));
          },
          "slot"_a, "timeout_s"_a, "CRC-32C of each block, or an empty list.")
      .def(
          "settled", [](GpuStager& s, size_t slot) { return with(s, slot).settled(slot); }, "slot"_a,
          "Whether the device has nothing more to do in the slot. Never waits.");
}

void bind_device(nb::module_& m) {
  nb::class_<GpuDevice>(m, "GpuDevice", "A CUDA device, opened at run time.")
      .def(nb::new_([](int ordinal, const std::string& driver, const std::string& nvrtc) {
             return value_or_raise(without_gil([&] { return GpuDevice::open(ordinal, {driver, nvrtc}); }));
           }),
           "ordinal"_a = 0, "driver"_a = "", "nvrtc"_a = "")
      .def_prop_ro("name", &GpuDevice::name)
      .def(
          "synchronize",
          [](GpuDevice& d, double timeout_s) {
            const Deadline deadline = deadline_in(timeout_s);
            check(without_gil([&] { return d.synchronize(deadline); }));
          },
          "timeout_s"_a)
      .def("quarantined_bytes",
           [](GpuDevice& d) { return without_gil([&] { return d.quarantined_bytes(); }); })
      .def(
          "make_stager",
          [](GpuDevice& d, uint64_t slot_bytes, size_t slots) {
            return value_or_raise(without_gil([&] { return d.make_stager(slot_bytes, slots); }));
          },
          "slot_bytes"_a, "slots"_a = 2)
      .def(
          "allocate",
          [](GpuDevice& d, uint64_t size) {
            return value_or_raise(without_gil([&] { return d.allocate(size); }));
          },
          "size"_a)
      .def(
          "release",
          [](GpuDevice& d, uint64_t address) { check(without_gil([&] { return d.release(address); })); },
          "address"_a)
      .def(
          "share",
          [](GpuDevice& d, uint64_t address, uint64_t size) {
            const GpuIpcHandle handle = value_or_raise(without_gil([&] { return d.share({address, size}); }));
            return nb::make_tuple(nb::bytes(handle.bytes.data(), handle.bytes.size()), handle.offset);
          },
          "address"_a, "size"_a, "(handle, offset) for attach() in another process of this host.")
      .def(
          "attach",
          [](GpuDevice& d, nb::bytes handle, uint64_t offset) {
            GpuIpcHandle out;
            if (handle.size() != out.bytes.size()) refuse("a handle of device memory has 64 bytes");
            std::memcpy(out.bytes.data(), handle.data(), out.bytes.size());
            out.offset = offset;
            return value_or_raise(without_gil([&] { return d.attach(out); }));
          },
          "handle"_a, "offset"_a)
      .def(
          "detach",
          [](GpuDevice& d, uint64_t address) { check(without_gil([&] { return d.detach(address); })); },
          "address"_a)
      .def(
          "export_dma_buf",
          [](GpuDevice& d, uint64_t address, uint64_t size) {
            const DmaBuf out = value_or_raise(d.export_dma_buf({address, size}));
            return nb::make_tuple(out.fd, out.offset, out.length);
          },
          "address"_a, "size"_a, "(fd, offset, length) for a device on the same bus; the caller closes fd.");
}

}  // namespace

void bind_gpu(nb::module_& m) {
  bind_stager(m);
  bind_device(m);
}

}  // namespace mooncache::python
