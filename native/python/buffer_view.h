// A Python object seen as bytes: bytes, bytearray, memoryview, numpy and torch arrays, anything
// contiguous that speaks the buffer protocol. Made and destroyed with the GIL held; the memory stays
// valid and in place in between, so the GIL may be released while it is read.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <span>
#include <string>

namespace mooncache::python {

class BufferView {
 public:
  // Throws TypeError when `object` is not a buffer, BufferError when it is not contiguous.
  explicit BufferView(nanobind::handle object, int flags = PyBUF_SIMPLE) {
    if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) throw nanobind::python_error();
  }
  ~BufferView() { PyBuffer_Release(&view_); }
  BufferView(const BufferView&) = delete;
  BufferView& operator=(const BufferView&) = delete;

  size_t size() const { return static_cast<size_t>(view_.len); }
  std::span<const std::byte> bytes() const { return {static_cast<const std::byte*>(view_.buf), size()}; }
  // Size of one item and its struct-module format; known when PyBUF_FORMAT was asked for.
  size_t item_size() const { return static_cast<size_t>(view_.itemsize); }
  std::string format() const { return view_.format == nullptr ? "B" : view_.format; }

 private:
  Py_buffer view_{};
};

inline nanobind::bytes to_bytes(std::span<const std::byte> bytes) {
  return nanobind::bytes(bytes.data(), bytes.size());
}

}  // namespace mooncache::python
