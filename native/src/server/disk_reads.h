// Blocks of one request that come up from the SSD tier. The request waits for the first of them that it
// cannot do without; those behind it are on their way meanwhile.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "mooncache/types.h"

namespace mooncache::server {

class PeerSession;

class DiskReads {
 public:
  using KeyOf = std::function<const Key&(size_t)>;

  // Memory has no block for item `at` of `count`. True: it is on its way, and kDisk has to follow; then
  // memory is to be looked at again. False: it does not come.
  bool waits(PeerSession& session, size_t at, size_t count, const KeyOf& key_of);

 private:
  struct Item {
    uint8_t tries = 0;
    std::shared_ptr<std::atomic<bool>> ended;  // null: it was not on the disk when it was asked for
  };
  void ask(PeerSession& session, const Key& key, Item& item);
  std::vector<Item> items_;
  size_t asked_ = 0;  // items before it were asked for, or were in memory when it was their turn
};

}  // namespace mooncache::server
