// The settings of RDMA as clients and store servers take them from Python: "rdma_enabled", "rdma_devices",
// ...
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>

#include "mooncache/rdma_config.h"

namespace mooncache::python {

// True when `name` is one of them and was set. ValueError for a value of another type.
inline bool set_rdma_field(const std::string& name, nanobind::handle value, RdmaConfig& config) {
  const auto set = [&](auto& into) {
    if (!nanobind::try_cast(value, into)) {
      throw nanobind::value_error((name + " has the wrong type or does not fit its range").c_str());
    }
    return true;
  };
  if (name == "rdma_enabled") return set(config.enabled);
  if (name == "rdma_library") return set(config.library);
  if (name == "rdma_devices") return set(config.devices);
  if (name == "rdma_rails_max") return set(config.rails_max);
  if (name == "rdma_gid_index") return set(config.gid_index);
  if (name == "rdma_ack_timeout") return set(config.ack_timeout);
  if (name == "rdma_traffic_class") return set(config.traffic_class);
  if (name == "rdma_service_level") return set(config.service_level);
  return false;
}

}  // namespace mooncache::python
