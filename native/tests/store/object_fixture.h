// An object store in memory behind the queue of requests, served by threads like those of a program: a test
// refuses, delays or changes what it likes.
#pragma once

#include <atomic>
#include <cerrno>
#include <chrono>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "mooncache/bytes.h"
#include "store/disk/object_requests.h"

namespace mooncache::test {

using store::disk::ObjectAnswer;
using store::disk::ObjectRequest;
using store::disk::ObjectRequests;

class Bucket {
 public:
  Bucket() = default;
  ~Bucket() {
    for (const auto& queue : queues_) queue->close();
    for (std::thread& thread : threads_) thread.join();
  }
  Bucket(const Bucket&) = delete;
  Bucket& operator=(const Bucket&) = delete;

  // Of one node.
  std::shared_ptr<ObjectRequests> open() {
    auto queue = std::make_shared<ObjectRequests>();
    queues_.push_back(queue);
    for (int i = 0; i < 2; ++i) {
      threads_.emplace_back([this, queue] {
        while (!queue->closed()) {
          auto taken = queue->take(50);
          if (!taken) continue;
          while (hangs && !queue->closed()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
          queue->complete(taken->id, answer(taken->request));
        }
      });
    }
    return queue;
  }
  std::vector<std::string> names() const {
    const std::lock_guard lock(mutex_);
    std::vector<std::string> names;
    for (const auto& [name, object] : objects_) names.push_back(name);
    return names;
  }
  uint64_t bytes() const {
    const std::lock_guard lock(mutex_);
    uint64_t bytes = 0;
    for (const auto& [name, object] : objects_) bytes += object.second.size();
    return bytes;
  }
  using Change = std::function<bool(const std::string& name, std::vector<std::byte>& bytes)>;
  // Of each object; it stays when `change` says so.
  void each(const Change& change) {
    const std::lock_guard lock(mutex_);
    for (auto one = objects_.begin(); one != objects_.end();) {
      one->second.first = ++version_;
      one = change(one->first, one->second.second) ? std::next(one) : objects_.erase(one);
    }
  }
  void put(const std::string& name, std::vector<std::byte> bytes) {
    const std::lock_guard lock(mutex_);
    objects_[name] = {++version_, std::move(bytes)};
  }

  std::atomic<int> error{0}, write_error{0};  // errno of every call, and of writes and deletions
  std::atomic<bool> hangs{false};
  std::atomic<uint64_t> reads{0}, writes{0};

 private:
  ObjectAnswer answer(ObjectRequest& request) {
    if (error != 0) return {-error, {}};
    const bool writes_there =
        request.kind == ObjectRequest::Kind::kWrite || request.kind == ObjectRequest::Kind::kDelete;
    if (writes_there && write_error != 0) return {-write_error, {}};
    const std::lock_guard lock(mutex_);
    switch (request.kind) {
      case ObjectRequest::Kind::kList: {
        Writer listing;
        for (const auto& [name, object] : objects_) {
          if (!name.starts_with(request.name)) continue;
          listing.str16(name);
          listing.u64(object.second.size());
          listing.u64(object.first);
        }
        return {0, listing.take()};
      }
      case ObjectRequest::Kind::kRead: {
        ++reads;
        const auto found = objects_.find(request.name);
        if (found == objects_.end()) return {-ENOENT, {}};
        const auto& bytes = found->second.second;
        const uint64_t begin = std::min<uint64_t>(request.offset, bytes.size());
        const uint64_t end = std::min<uint64_t>(request.offset + request.size, bytes.size());
        return {0,
                {bytes.begin() + static_cast<std::ptrdiff_t>(begin),
                 bytes.begin() + static_cast<std::ptrdiff_t>(end)}};
      }
      case ObjectRequest::Kind::kWrite:
        ++writes;
        objects_[request.name] = {++version_, std::move(request.bytes)};
        return {0, {}};
      case ObjectRequest::Kind::kDelete:
        return {objects_.erase(request.name) > 0 ? 0 : -ENOENT, {}};
    }
    return {-EINVAL, {}};
  }

  mutable std::mutex mutex_;
  std::map<std::string, std::pair<uint64_t, std::vector<std::byte>>> objects_;  // with their versions
  uint64_t version_ = 0;
  std::vector<std::shared_ptr<ObjectRequests>> queues_;
  std::vector<std::thread> threads_;
};

}  // namespace mooncache::test
