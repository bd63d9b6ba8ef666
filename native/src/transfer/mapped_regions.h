// Memory of a peer on the same host, mapped into this process. What the peer says is checked against the
// descriptors that it passed, and the memory is sealed against shrinking.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "mooncache/bytes.h"
#include "mooncache/status.h"
#include "net/socket.h"
#include "wire/ranges.h"

namespace mooncache::transfer {

class MappedRegions {
 public:
  MappedRegions() = default;
  ~MappedRegions() { clear(); }
  MappedRegions(const MappedRegions&) = delete;
  MappedRegions& operator=(const MappedRegions&) = delete;

  // TRANSPORT_UNAVAILABLE: the descriptors are not such memory.
  Status add(const wire::MappedRegion& region, std::vector<net::UniqueFd> fds);
  // Null: not inside one mapped region, or not to be written.
  std::byte* find(uint64_t address, uint64_t length, bool write) const;
  bool covers(uint64_t address) const;
  void clear();

 private:
  struct Mapping {
    std::byte* data;
    uint64_t size;
    bool writable;
  };
  std::map<uint64_t, Mapping> by_base_;
};

}  // namespace mooncache::transfer
