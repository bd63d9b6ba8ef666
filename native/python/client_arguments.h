// Python arguments of the client as C++ ones: keys, buffers, lists of buffers. Buffers stay exported as long
// as the object that took them lives, so that they cannot be freed or resized under a call.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <cstring>
#include <deque>
#include <span>
#include <string>
#include <vector>

#include "calls.h"
#include "mooncache/bytes.h"

namespace mooncache::python {

namespace nb = nanobind;

// Exported buffers of one call.
class Buffers {
 public:
  Buffers() = default;
  Buffers(const Buffers&) = delete;
  Buffers& operator=(const Buffers&) = delete;
  ~Buffers() {
    for (Py_buffer& view : views_) PyBuffer_Release(&view);
  }

  Slice add(nb::handle object, bool writable) {
    if (PyObject_CheckBuffer(object.ptr()) != 0) {
      Py_buffer view;
      if (PyObject_GetBuffer(object.ptr(), &view, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) != 0) {
        PyErr_Clear();
        refuse_buffer(object, writable);
      }
      views_.push_back(view);
      return {static_cast<std::byte*>(view.buf), static_cast<size_t>(view.len)};
    }
    return add_tensor(object, writable);
  }

 private:
  [[noreturn]] static void refuse_buffer(nb::handle object, bool writable) {
    Py_buffer view;
    if (writable && PyObject_GetBuffer(object.ptr(), &view, PyBUF_SIMPLE) == 0) {
      PyBuffer_Release(&view);
      refuse("the destination is read-only; pass a bytearray, a writable array or a tensor");
    }
    PyErr_Clear();
    refuse("the buffer is not contiguous; pass a contiguous copy, or its pieces as a list");
  }

  // CPU tensors by DLPack (torch, for instance).
  Slice add_tensor(nb::handle object, bool writable) {
    nb::ndarray<nb::ro, nb::device::cpu, nb::c_contig> tensor;
    if (!nb::try_cast(object, tensor)) {
      nb::ndarray<nb::ro> any;
      if (!nb::try_cast(object, any)) {
        refuse("expected a bytes-like object, a NumPy array or a CPU tensor, not " +
               std::string(nb::type_name(object.type()).c_str()));
      }
      if (any.device_type() != nb::device::cpu::value)
        refuse("the tensor is not in host memory; this build moves host memory only");
      refuse("the tensor is not contiguous; pass a contiguous copy, or its pieces as a list");
    }
    if (writable) {
      nb::ndarray<nb::device::cpu, nb::c_contig> destination;
      if (!nb::try_cast(object, destination))
        refuse("the destination is read-only; pass a writable array or tensor");
    }
    const Slice slice{static_cast<std::byte*>(const_cast<void*>(tensor.data())), tensor.nbytes()};
    tensors_.push_back(std::move(tensor));
    return slice;
  }

  std::deque<Py_buffer> views_;
  std::deque<nb::ndarray<nb::ro, nb::device::cpu, nb::c_contig>> tensors_;
};

// A buffer, or a list or tuple of buffers, appended to `slices`.
template <typename S>
void add_slices(Buffers& buffers, nb::handle object, bool writable, std::vector<S>& slices) {
  if (PyList_Check(object.ptr()) || PyTuple_Check(object.ptr())) {
    for (nb::handle part : object) slices.push_back(buffers.add(part, writable));
  } else {
    slices.push_back(buffers.add(object, writable));
  }
}

inline std::vector<Key> to_keys(nb::handle object) {
  std::vector<Key> keys;
  if (PyBytes_Check(object.ptr())) {
    const auto size = static_cast<size_t>(PyBytes_GET_SIZE(object.ptr()));
    if (size % kKeyBytes != 0)
      refuse("keys as one bytes object need 32 bytes per key, not " + std::to_string(size) + " in all");
    keys.resize(size / kKeyBytes);
    if (size > 0) std::memcpy(keys.data(), PyBytes_AS_STRING(object.ptr()), size);
    return keys;
  }
  if (!PyList_Check(object.ptr()) && !PyTuple_Check(object.ptr()))
    refuse("keys must be a list of 32-byte keys, or one bytes object");
  for (nb::handle item : object) {
    if (!PyBytes_Check(item.ptr()) || PyBytes_GET_SIZE(item.ptr()) != static_cast<Py_ssize_t>(kKeyBytes)) {
      refuse("key " + std::to_string(keys.size()) + " is not a bytes object of 32 bytes");
    }
    std::memcpy(keys.emplace_back().bytes.data(), PyBytes_AS_STRING(item.ptr()), kKeyBytes);
  }
  return keys;
}

// The slices of a batch of buffers: all in one vector, cut per block afterwards.
template <typename S>
struct Batch {
  Buffers buffers;
  std::vector<S> slices;
  std::vector<size_t> ends;

  Batch(nb::handle objects, size_t count, bool writable, const char* what) {
    if (!PyList_Check(objects.ptr()) && !PyTuple_Check(objects.ptr()))
      refuse(std::string(what) + " must be a list");
    ends.reserve(count);
    for (nb::handle object : objects) {
      add_slices(buffers, object, writable, slices);
      ends.push_back(slices.size());
    }
    if (ends.size() != count) {
      refuse(std::to_string(count) + " keys need as many " + what + ", not " + std::to_string(ends.size()));
    }
  }
  std::span<const S> of(size_t i) const {
    const size_t begin = i == 0 ? 0 : ends[i - 1];
    return std::span(slices).subspan(begin, ends[i] - begin);
  }
};

}  // namespace mooncache::python
