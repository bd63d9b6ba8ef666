#include "store/disk/object_requests.h"

#include <cerrno>
#include <chrono>
#include <future>
#include <memory>
#include <utility>

namespace mooncache::store::disk {

namespace {

constexpr uint32_t kLookMs = 50;  // whether who waits has to stop

uint64_t steady_now_ms() {
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::milliseconds>(
                                   std::chrono::steady_clock::now().time_since_epoch())
                                   .count());
}

}  // namespace

bool ObjectRequests::submit(ObjectRequest request, uint32_t timeout_ms, Done done) {
  const std::lock_guard lock(mutex_);
  if (closed_ || waiting_.size() >= most_waiting_) return false;
  const uint64_t id = next_id_++;
  waiting_.emplace(id, Waiting{std::move(request), std::move(done), steady_now_ms() + timeout_ms});
  queue_.push_back(id);
  asked_.notify_one();
  return true;
}

void ObjectRequests::expire() {
  std::vector<Done> overdue;
  {
    const std::lock_guard lock(mutex_);
    const uint64_t now_ms = steady_now_ms();
    for (auto at = waiting_.begin(); at != waiting_.end();) {
      if (now_ms <= at->second.until_ms) {
        ++at;
        continue;
      }
      overdue.push_back(std::move(at->second.done));
      at = waiting_.erase(at);
    }
  }
  for (const Done& done : overdue) done({-ETIMEDOUT, {}});
}

ObjectAnswer ObjectRequests::call(ObjectRequest request, uint32_t timeout_ms, const std::atomic<bool>* stop) {
  auto promise = std::make_shared<std::promise<ObjectAnswer>>();
  auto answer = promise->get_future();
  const uint64_t until_ms = steady_now_ms() + timeout_ms;
  if (!submit(std::move(request), timeout_ms,
              [promise](ObjectAnswer ended) { promise->set_value(std::move(ended)); }))
    return {closed() ? -ECANCELED : -EAGAIN, {}};
  for (;;) {
    if (answer.wait_for(std::chrono::milliseconds(kLookMs)) == std::future_status::ready) return answer.get();
    if (stop != nullptr && stop->load()) return {-ECANCELED, {}};
    if (steady_now_ms() > until_ms) return {-ETIMEDOUT, {}};
  }
}

std::optional<ObjectRequests::Taken> ObjectRequests::take(uint32_t wait_ms) {
  expire();
  std::unique_lock lock(mutex_);
  asked_.wait_for(lock, std::chrono::milliseconds(wait_ms), [this] { return closed_ || !queue_.empty(); });
  while (!queue_.empty()) {
    const uint64_t id = queue_.front();
    queue_.pop_front();
    const auto found = waiting_.find(id);
    if (found == waiting_.end()) continue;  // overdue before anybody took it
    return Taken{id, std::move(found->second.request)};
  }
  return std::nullopt;
}

void ObjectRequests::complete(uint64_t id, ObjectAnswer answer) {
  Done done;
  {
    const std::lock_guard lock(mutex_);
    const auto found = waiting_.find(id);
    if (found == waiting_.end()) return;
    done = std::move(found->second.done);
    waiting_.erase(found);
  }
  done(std::move(answer));
}

void ObjectRequests::close() {
  std::map<uint64_t, Waiting> waiting;
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    waiting.swap(waiting_);
    queue_.clear();
    asked_.notify_all();
  }
  for (auto& [id, one] : waiting) one.done({-ECANCELED, {}});
}

bool ObjectRequests::closed() const {
  const std::lock_guard lock(mutex_);
  return closed_;
}

}  // namespace mooncache::store::disk
