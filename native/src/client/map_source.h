// Follows the cluster for a ClusterClient: asks nodes of the map, in turn, whether they have a newer one, and
// the seeds when none of them answers. What was answered is judged by MapFollower.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "client/map_follower.h"
#include "mooncache/cluster_client.h"

namespace mooncache {

// A data port as people write it: "host:port", "[::1]:7801" or "unix:/path". INVALID_ARGUMENT.
Result<NodeInfo> seed_of(const std::string& text, uint32_t index);

class MapSource {
 public:
  // `scout`: a client whose map is the seeds.
  MapSource(std::unique_ptr<Client> scout, uint32_t seeds, uint32_t refresh_ms);
  ~MapSource() { stop(); }
  MapSource(const MapSource&) = delete;
  MapSource& operator=(const MapSource&) = delete;

  // Asks the seeds until one answers, on the caller's thread.
  Status first(Deadline deadline);
  std::vector<NodeInfo> nodes() const;
  // From now on `client` gets each map. It outlives this object.
  void follow(Client& client);
  void wake();
  void stop();
  void set_key(const std::array<std::byte, 32>& key) { scout_->set_key(key); }
  ClusterState state() const;

 private:
  struct Place {
    Client* client = nullptr;
    uint32_t node = 0;
  };

  void run();
  bool wait(uint64_t pause_ms);
  // The nodes to ask, the one to begin with at the front: a few of the map, then the seeds.
  std::vector<Place> places();
  Status ask_any(Deadline deadline);
  Status ask(const Place& place, Deadline deadline);
  void publish();  // with the lock

  const std::unique_ptr<Client> scout_;
  const uint32_t seeds_;
  const uint32_t refresh_ms_;
  CancelToken cancel_;
  std::thread thread_;
  std::mt19937_64 random_;        // of the thread that asks
  uint32_t favourite_ = kNoNode;  // the node that answered last
  uint32_t stays_ = 0;

  mutable std::mutex mutex_;  // guards all below
  std::condition_variable changed_;
  bool stop_ = false;
  bool woken_ = false;
  Client* client_ = nullptr;
  MapFollower follower_;
  uint64_t version_ = 0;  // of the maps that the client got: they only grow, whichever master made them
  uint64_t confirmed_ms_ = 0;
  ClusterState counts_;
};

}  // namespace mooncache
