// What every call from Python has in common: mistakes of the caller are a ValueError, a call that failed as a
// whole is a RuntimeError(code, name, message) that the package turns into its typed error, work that may
// wait runs without the GIL, a time limit in seconds becomes a deadline.
#pragma once

#include <nanobind/nanobind.h>

#include <chrono>
#include <string>
#include <utility>

#include "mooncache/status.h"
#include "mooncache/types.h"

namespace mooncache::python {

namespace nb = nanobind;

[[noreturn]] inline void refuse(const std::string& sentence) {
  throw nb::value_error(sentence.c_str());
}

[[noreturn]] inline void raise(const Status& status) {
  const nb::tuple args =
      nb::make_tuple(static_cast<int>(status.code), std::string(code_name(status.code)), status.message);
  PyErr_SetObject(PyExc_RuntimeError, args.ptr());
  throw nb::python_error();
}

inline void check(const Status& status) {
  if (!status) raise(status);
}

template <typename T>
T value_or_raise(Result<T> result) {
  if (!result) raise(result.status());
  return std::move(*result);
}

template <typename Work>
auto without_gil(Work work) {
  const nb::gil_scoped_release release;
  return work();
}

inline Deadline deadline_in(double timeout_s) {
  if (!(timeout_s >= 0)) refuse("timeout_s must be a number of seconds, 0 or more");
  if (timeout_s > 1e8) return Deadline::never();
  return Deadline::after(std::chrono::nanoseconds(static_cast<int64_t>(timeout_s * 1e9)));
}

}  // namespace mooncache::python
