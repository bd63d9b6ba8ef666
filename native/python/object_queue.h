// The queue of calls on an object store, as Python holds it: the native side keeps it alive without Python.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <string>

#include "mooncache/store.h"
#include "store/disk/object_requests.h"

namespace mooncache::python {

struct ObjectQueue {
  std::shared_ptr<store::disk::ObjectRequests> requests = std::make_shared<store::disk::ObjectRequests>();
};

// True when `name` is a setting of the object store, which was set.
inline bool set_shared_objects(const std::string& name, nanobind::handle value, DiskConfig& disk) {
  const auto number = [&](auto& field) {
    if (!nanobind::try_cast(value, field))
      throw nanobind::value_error((name + " must be a number that fits its range").c_str());
    return true;
  };
  if (name == "shared_spool_bytes") return number(disk.shared_spool_bytes);
  if (name == "shared_timeout_ms") return number(disk.shared_timeout_ms);
  if (name == "shared_upload_ms") return number(disk.shared_upload_ms);
  if (name != "shared_objects") return false;
  if (!nanobind::isinstance<ObjectQueue>(value))
    throw nanobind::value_error("shared_objects must be an ObjectRequests");
  disk.shared_objects = nanobind::cast<ObjectQueue&>(value).requests;
  return true;
}

}  // namespace mooncache::python
