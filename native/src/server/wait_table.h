// The waits that are open on a node, and the keys that their writers gave up lately. It knows no socket and
// no clock: a loop adds a wait, commits mark its keys, and the loop takes the frames that are due.
//
// No commit is missed: a wait is added first, then its owner looks into the store and reports what is there.
// Where nothing waits, a commit costs one load.
//
// A connection that asked for it hears a sign of life when it has heard nothing for a while: at once with its
// first wait after such a pause, then again and again. It is one frame for the connection, however many waits
// it has.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "mooncache/status.h"
#include "mooncache/types.h"
#include "wire/messages.h"

namespace mooncache::server {

class WaitTable {
 public:
  static constexpr uint64_t kNever = UINT64_MAX;
  // How long, and of how many keys, it is remembered that their writer gave them up: for a wait that comes
  // late.
  static constexpr uint64_t kGivenUpMs = 1000;
  static constexpr size_t kGivenUpKeys = 65'536;
  // Signs of life that are asked for more often come this often.
  static constexpr uint64_t kHeartbeatMinMs = 20;

  struct Limits {
    uint32_t waits_per_owner = 0;
    uint64_t keys = 0;
  };
  // A frame that a wait's owner has to send; kMore: it is not the last one.
  struct News {
    uint64_t request_id = 0;
    wire::WaitState state = wire::WaitState::kMore;
    std::vector<uint32_t> positions;
    bool heartbeat = false;  // there is nothing to say but that the node lives
  };
  // The connection of a wait. One thread adds its waits, takes their frames and forgets them.
  class Owner {
   public:
    uint32_t open_waits() const { return open_waits_; }
    virtual void send_news(const News& news) = 0;

   protected:
    ~Owner() = default;

   private:
    friend class WaitTable;
    uint32_t open_waits_ = 0;
    uint64_t spoken_ms_ = 0;  // its last frame; 0: none so far
  };

 private:
  struct Wait;

 public:
  // The waits of one thread.
  class Group {
   public:
    // `wake` is called, from any thread, when the next frame is due sooner than it was.
    explicit Group(std::function<void()> wake) : wake_(std::move(wake)) {}
    uint64_t next_due_ms() const { return next_due_ms_.load(); }

   private:
    friend class WaitTable;
    const std::function<void()> wake_;
    std::set<std::pair<uint64_t, Wait*>> due_;
    std::atomic<uint64_t> next_due_ms_{kNever};
  };

  explicit WaitTable(Limits limits);
  ~WaitTable();
  WaitTable(const WaitTable&) = delete;
  WaitTable& operator=(const WaitTable&) = delete;

  // LIMIT_EXCEEDED, or INVALID_ARGUMENT: the owner has an open wait with this number. report_present() has to
  // follow.
  Status add(Group& group, Owner& owner, uint64_t request_id, TenantId tenant,
             const wire::WaitRequest& request, uint64_t now_ms);
  // Positions of keys that were in the store after add().
  void report_present(Owner& owner, uint64_t request_id, std::span<const uint32_t> positions,
                      uint64_t now_ms);
  // Its last frame comes now; a wait that has ended is ignored.
  void withdraw(Owner& owner, uint64_t request_id);
  // The owner ends. Returns how many waits ended with it.
  uint32_t forget(Owner& owner);
  // Calls send_news() for what is due.
  void send_due(Group& group, uint64_t now_ms);

  // From any thread, no lock but a shard's held.
  void committed(TenantId tenant, const Key& key) {
    if (active_.load() != 0) mark_committed(tenant, key);
  }
  // Returns how many waits end by it.
  uint32_t give_up(TenantId tenant, std::span<const Key> keys, uint64_t now_ms);
  // Now and then: forgets what was given up long ago.
  void expire(uint64_t now_ms) {
    if (active_.load() != 0) expire_given_up(now_ms);
  }

  uint64_t open_waits() const { return open_waits_.load(); }
  uint64_t open_keys() const { return open_keys_.load(); }

 private:
  struct Name {
    TenantId tenant = 0;
    Key key;
    bool operator==(const Name&) const = default;
  };
  // With secret seeds, so that no client can choose keys that collide.
  struct Hash {
    uint64_t seeds[2] = {};
    size_t operator()(const Name& name) const;
  };
  // One key of one wait, in the list of all that wait for this key.
  struct Place {
    Wait* wait = nullptr;
    uint32_t position = 0;
    Place* previous = nullptr;
    Place* next = nullptr;
  };
  using Woken = std::vector<Group*>;

  void mark_committed(TenantId tenant, const Key& key);
  void expire_given_up(uint64_t now_ms);
  Wait* find(Owner& owner, uint64_t request_id);
  void link(Wait& wait, uint32_t position);
  void unlink(Place& place);
  void mark_present(Wait& wait, uint32_t position);
  void end(Wait& wait, wire::WaitState state, Woken& woken);
  static std::optional<News> news_of(Wait& wait, uint64_t now_ms);
  void schedule(Wait& wait, Woken& woken);
  void publish_due(Group& group, Woken& woken);
  void remove(Wait& wait);
  void forget_given_up(const Name& name);
  void count();
  static void wake(const Woken& woken);

  const Limits limits_;
  std::atomic<uint64_t> active_{0};  // open waits and remembered keys
  std::atomic<uint64_t> open_waits_{0}, open_keys_{0};
  std::mutex mutex_;
  std::map<std::pair<Owner*, uint64_t>, std::unique_ptr<Wait>> waits_;
  uint64_t keys_ = 0;
  const Hash hash_;
  std::unordered_map<Name, Place*, Hash> places_;         // the first of each list
  std::unordered_map<Name, uint64_t, Hash> given_up_;     // until when
  std::deque<std::pair<uint64_t, Name>> given_up_order_;  // those given up again are in it twice
};

}  // namespace mooncache::server
