// One epoll loop: its thread owns every connection that was given to it. Other threads reach it only
// through adopt(), space_freed(), stop() and the counters.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "mooncache/bytes.h"
#include "net/stream.h"
#include "server/metrics.h"
#include "server/shared.h"

namespace mooncache::server {

class Connection;
class Loop;

// What an epoll event points at.
struct Watched {
  enum class Kind : uint8_t { kWake, kListener, kConnection };
  explicit Watched(Kind kind_in) : kind(kind_in) {}
  Kind kind;
};

struct Listener : Watched {
  Listener() : Watched(Kind::kListener) {}
  net::UniqueFd fd;
  bool is_unix = false;
  bool paused = true;                    // not watched for a while; the backlog waits
  std::shared_ptr<net::TlsContext> tls;  // null = plain
};

struct Newcomer {
  net::UniqueFd fd;
  bool is_unix = false;
  bool surplus = false;  // beyond max_connections: it hears why and goes
  std::shared_ptr<net::TlsContext> tls;
};

// What one visit of a connection may move and check.
struct Visit {
  uint64_t read_bytes, write_bytes, check_bytes;
};

class Loop {
 public:
  static constexpr size_t kScratchBytes = 64 << 10;
  static constexpr uint64_t kNoWait = UINT64_MAX;

  explicit Loop(Shared& shared);
  ~Loop();
  Loop(const Loop&) = delete;
  Loop& operator=(const Loop&) = delete;

  Status open();
  // Before run(): this loop accepts for all of `loops`.
  void listen(std::vector<std::unique_ptr<Listener>> listeners, std::vector<Loop*> loops);
  void run();

  // From any thread.
  void adopt(Newcomer newcomer);
  void space_freed();
  // Something that a connection asked of a disk has ended.
  void landed(uint64_t serial);
  // The ticket of who waits longest for space here; kNoWait.
  uint64_t longest_wait() const { return longest_wait_.load(); }
  void stop(Deadline deadline);
  uint32_t load() const { return load_.load(std::memory_order_relaxed); }

  // For connections, on the loop's thread.
  void watch(Connection& connection, uint32_t events);
  void run_again(Connection& connection);  // a turn without waiting for the socket
  const Visit& visit() const { return *visit_; }
  void spend(uint64_t bytes) { turn_bytes_ += bytes; }
  // The same from what a visit may spend.
  void spend(uint64_t bytes, uint64_t& budget) {
    budget -= std::min(budget, bytes);
    spend(bytes);
  }
  // Before an attempt to get space that park() may follow.
  void about_to_reserve() { releases_seen_ = shared_.space_releases.load(); }
  void park(Connection& connection);        // a turn when space was freed, or soon
  void await_disk(Connection& connection);  // a turn when something of it landed, and now and then
  void dead(Connection& connection);        // deleted at the end of the turn
  std::span<std::byte> scratch() { return scratch_; }
  std::span<std::byte> discard() { return discard_; }
  // For a look at a block that the processor cannot address: RangeCheck::kStepBytes.
  std::span<std::byte> look_at();
  Writer& writer() {
    writer_.bytes().clear();
    return writer_;
  }
  uint64_t now_ms() const { return now_ms_; }
  static uint64_t now_ns();
  Shared& shared() { return shared_; }
  WaitTable::Group& waits() { return waits_; }

  LoopMetrics metrics;

 private:
  int wait_ms() const;
  void accept_some(Listener& listener);
  void accept_failed(Listener& listener, int error);
  void keep_spare();
  void pause(Listener& listener);
  void resume_listening();
  void take_newcomers();
  void take_landed();
  void retry_disk(const std::vector<uint64_t>& serials);
  void install(Newcomer newcomer);
  void ready(Connection& connection, uint32_t events);
  void enqueue(Connection& connection);
  void run_queue();
  void retry_parked();
  void publish_longest_wait();
  void tick();
  void look_at_arena();
  void close_largest();
  void remove_dead();
  void advance_stop();
  void wake();

  Shared& shared_;
  net::UniqueFd epoll_;
  net::UniqueFd wake_fd_;
  Watched wake_watched_{Watched::Kind::kWake};
  std::vector<std::unique_ptr<Listener>> listeners_;
  std::vector<Loop*> loops_;
  net::UniqueFd spare_;          // given up to take and close a connection when there is no descriptor left
  bool accept_failing_ = false;  // and logged
  bool full_ = false;            // and logged: max_connections are open
  bool some_paused_ = false;
  uint64_t listening_retry_ms_ = 0;

  std::vector<std::unique_ptr<Connection>> connections_;
  std::vector<Connection*> dead_;
  std::map<uint64_t, Connection*> awaiting_disk_;  // by serial; those that no longer wait are still there
  std::map<uint64_t, Connection*> parked_;         // by ticket; those that no longer wait are still there
  uint64_t next_serial_ = 1;
  uint64_t releases_seen_ = 0;
  // Connections with many bytes to move or to check, in turn.
  std::deque<Connection*> queue_;
  const Visit* visit_;
  uint64_t turn_bytes_ = 0;
  std::atomic<uint32_t> load_{0};
  uint64_t now_ms_ = 0;
  uint64_t next_tick_ms_ = 0;
  uint64_t parked_retry_ms_ = 0;
  WaitTable::Group waits_;

  std::vector<std::byte> scratch_, discard_;
  std::vector<std::byte> look_at_;
  Writer writer_;

  std::atomic<bool> woken_{false};
  std::atomic<bool> space_freed_{false};
  std::atomic<uint64_t> longest_wait_{kNoWait};
  std::atomic<bool> stopping_{false};
  std::mutex mutex_;  // guards newcomers_, landed_ and stop_deadline_
  std::vector<uint64_t> landed_;
  std::vector<Newcomer> newcomers_;
  Deadline stop_deadline_;
};

}  // namespace mooncache::server
