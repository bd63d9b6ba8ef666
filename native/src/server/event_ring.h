// The node's log as structured events: a bounded ring that loops append to and the Python shell
// drains into its own logging. When it is not drained, the oldest events go and a count says how many.
#pragma once

#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace mooncache::server {

struct LogEvent {
  uint8_t level = 20;  // 10 debug, 20 info, 30 warning, 40 error: the numbers of Python's logging
  std::string event;   // stable code, e.g. "connection_refused"
  std::string message;
};

class EventRing {
 public:
  explicit EventRing(size_t capacity) : capacity_(capacity) {}

  void push(uint8_t level, std::string event, std::string message) {
    const std::lock_guard lock(mutex_);
    if (events_.size() >= capacity_) {
      events_.pop_front();
      ++lost_;
    }
    events_.push_back({level, std::move(event), std::move(message)});
  }

  std::vector<LogEvent> drain(size_t max_events) {
    const std::lock_guard lock(mutex_);
    std::vector<LogEvent> taken;
    if (lost_ != 0 && max_events != 0) {
      taken.push_back(
          {30, "log_events_lost", std::to_string(lost_) + " events were dropped: the ring was full"});
      lost_ = 0;
    }
    while (!events_.empty() && taken.size() < max_events) {
      taken.push_back(std::move(events_.front()));
      events_.pop_front();
    }
    return taken;
  }

 private:
  std::mutex mutex_;
  const size_t capacity_;
  std::deque<LogEvent> events_;
  uint64_t lost_ = 0;
};

}  // namespace mooncache::server
