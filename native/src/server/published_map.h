// The cluster map as a node hands it out: encoded once for each map, read by all loops.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "mooncache/bytes.h"
#include "wire/cluster_map.h"

namespace mooncache::server {

class PublishedMap {
 public:
  // False, and the former one stays: the map is beyond the limits of the protocol.
  bool publish(const ClusterMap& map);
  // Appends the page that a request asks for. False: there is no map yet.
  bool write_page(const wire::ClusterMapRequest& request, Writer& out) const;

 private:
  struct Encoded {
    uint64_t term = 0;
    uint64_t epoch = 0;
    std::vector<std::byte> records;
    std::vector<size_t> ends;  // of each node's record
  };

  mutable std::mutex mutex_;
  std::shared_ptr<const Encoded> current_;
};

}  // namespace mooncache::server
