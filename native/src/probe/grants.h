// Where a benchmark's bytes go on the node: reserved extents to write, pinned blocks to read. Whatever is
// granted ends with the link at the latest.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "mooncache/transport.h"

namespace mooncache::probe {

class Grants {
 public:
  virtual ~Grants() = default;
  // `count` new writable extents of `size` bytes each.
  virtual Result<std::vector<RemoteExtent>> reserve(uint32_t count, uint64_t size) = 0;
  // Makes blocks of what was written, and pins them to be read.
  virtual Result<std::vector<RemoteExtent>> publish(std::span<const RemoteExtent> written,
                                                    std::span<const uint32_t> crcs) = 0;
  virtual Status give_up(std::span<const RemoteExtent> reserved) = 0;
};

// Over the session of a link to a real node, which must outlive the grants.
std::unique_ptr<Grants> node_grants(Link& link, bool expose, uint32_t seed);
// In this process; makes the link too.
std::unique_ptr<Grants> loopback_grants(std::unique_ptr<Link>& link);

}  // namespace mooncache::probe
