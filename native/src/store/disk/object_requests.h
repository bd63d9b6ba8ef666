// Calls on an object store, asked here and carried out by whoever serves this queue: threads of the program
// that owns the node, with any library. So the data plane needs none, and waits for no call of one.
//
// Any thread asks; serving threads take() what is asked, and complete() it. No one waits longer than the time
// that he gives: what ends later changes nothing. Names are relative to where the owner keeps the objects.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace mooncache::store::disk {

struct ObjectRequest {
  enum class Kind : uint8_t { kList, kRead, kWrite, kDelete };
  Kind kind = Kind::kList;
  std::string name;              // kList: what names begin with
  uint64_t offset = 0;           // kRead
  uint64_t size = 0;             // kRead
  std::vector<std::byte> bytes;  // kWrite: the whole object, which is there as a whole or not at all
};

struct ObjectAnswer {
  int64_t result = 0;  // 0, or -errno; -ENOENT: there is no such object, or no such range of it
  // kRead: the range, shorter where the object ends. kList: for each object its name (str16), size (u64), and
  // a number that differs when its bytes do (u64).
  std::vector<std::byte> bytes;
};

class ObjectRequests {
 public:
  using Done = std::function<void(ObjectAnswer)>;
  struct Taken {
    uint64_t id = 0;
    ObjectRequest request;
  };

  explicit ObjectRequests(size_t most_waiting = 1024) : most_waiting_(most_waiting) {}

  // `done` is called once, without a lock. False: too much waits, or it is closed.
  bool submit(ObjectRequest request, uint32_t timeout_ms, Done done);
  // Ends what is overdue with -ETIMEDOUT.
  void expire();
  // Asks, and waits. -ETIMEDOUT, -EAGAIN (too much waits), -ECANCELED (closed, or `*stop` was set).
  ObjectAnswer call(ObjectRequest request, uint32_t timeout_ms, const std::atomic<bool>* stop = nullptr);

  // For who serves. Nothing within `wait_ms`, or at the end.
  std::optional<Taken> take(uint32_t wait_ms);
  void complete(uint64_t id, ObjectAnswer answer);
  // Everything that waits ends with -ECANCELED, and so does what is asked later.
  void close();
  bool closed() const;

 private:
  struct Waiting {
    ObjectRequest request;
    Done done;
    uint64_t until_ms = 0;
  };
  const size_t most_waiting_;
  mutable std::mutex mutex_;
  std::condition_variable asked_;
  std::map<uint64_t, Waiting> waiting_;  // also what was taken
  std::deque<uint64_t> queue_;
  uint64_t next_id_ = 1;
  bool closed_ = false;
};

}  // namespace mooncache::store::disk
