// Host names to addresses, without a wait on the thread that asks.
//
// getaddrinfo takes as long as the system's resolver likes, often many seconds when a name server is dead,
// and cannot be cancelled. It runs on threads of its own, which end when nothing is left to look up; a lookup
// tells by a descriptor that it is done. A caller that gives up drops the lookup. One name is looked up once
// for all who ask at the same time, so a dead name costs one thread.
#pragma once

#include <sys/socket.h>

#include <atomic>
#include <cassert>
#include <memory>
#include <string>
#include <vector>

#include "mooncache/status.h"
#include "net/socket.h"

namespace mooncache::net {

// Of a process. More lookups than these wait for one to end.
inline constexpr int kResolverThreads = 16;

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t size = 0;
  const sockaddr* get() const { return static_cast<const sockaddr*>(static_cast<const void*>(&storage)); }
  int family() const { return storage.ss_family; }
};

class Lookup {
 public:
  using Addresses = Result<std::vector<SocketAddress>>;
  Lookup(std::string host, uint16_t port) : host_(std::move(host)), port_(port) {}

  bool done() const { return done_.load(std::memory_order_acquire); }
  // Readable from the moment it is done, for all who wait. -1: it was done at once.
  int fd() const { return event_.get(); }
  // Once it is done: at least one address, or NODE_UNAVAILABLE.
  const Addresses& addresses() const {
    // this look makes what the other thread wrote visible here
    [[maybe_unused]] const bool resolved = done();
    assert(resolved);
    return addresses_;
  }

 private:
  friend std::shared_ptr<Lookup> look_up(const std::string& host, uint16_t port);
  friend class ResolverThreads;
  bool is_of(const std::string& host, uint16_t port) const { return host_ == host && port_ == port; }
  void finish(Addresses addresses);

  const std::string host_;
  const uint16_t port_;
  UniqueFd event_;
  Addresses addresses_{Code::kNodeUnavailable, "not resolved yet"};
  std::atomic<bool> done_{false};
};

// Never waits. A numeric address is done at once.
std::shared_ptr<Lookup> look_up(const std::string& host, uint16_t port);

}  // namespace mooncache::net
