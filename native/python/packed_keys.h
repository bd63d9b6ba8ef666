// Keys as Python passes them: one buffer, 32 bytes for each.
#pragma once

#include <nanobind/nanobind.h>

#include <cstring>
#include <vector>

#include "buffer_view.h"
#include "mooncache/types.h"

namespace mooncache::python {

inline std::vector<Key> parse_keys(const BufferView& view) {
  if (view.size() % kKeyBytes != 0) throw nanobind::value_error("keys must be a multiple of 32 bytes");
  std::vector<Key> keys(view.size() / kKeyBytes);
  if (!keys.empty()) std::memcpy(keys.data(), view.bytes().data(), view.size());
  return keys;
}

}  // namespace mooncache::python
