// Reads and writes by a few threads that block: where io_uring is refused.
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

#include "store/disk/io_queue.h"

namespace mooncache::store::disk {

namespace {

int64_t carry_out(int fd, const Io& io) {
  ssize_t result = -1;
  do {
    const auto offset = static_cast<off_t>(io.offset);
    switch (io.kind) {
      case Io::Kind::kRead:
        result = ::pread(fd, io.memory.data, io.memory.size, offset);
        break;
      case Io::Kind::kWrite:
        result = ::pwrite(fd, io.memory.data, io.memory.size, offset);
        break;
      case Io::Kind::kSync:
        result = ::fdatasync(fd);
        break;
    }
  } while (result < 0 && errno == EINTR);
  return result < 0 ? -static_cast<int64_t>(errno) : result;
}

class ThreadQueue final : public IoQueue {
 public:
  ThreadQueue(int fd, uint32_t depth, uint32_t threads, std::string why)
      : fd_(fd), depth_(depth), why_(std::move(why)) {
    for (uint32_t i = 0; i < threads; ++i) threads_.emplace_back([this] { work(); });
  }
  ~ThreadQueue() override {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    wanted_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  bool submit(const Io& io) override {
    const std::lock_guard lock(mutex_);
    if (under_way_ >= depth_) return false;
    ++under_way_;
    todo_.push_back(io);
    wanted_.notify_one();
    return true;
  }
  void wait(std::vector<IoEnd>& ends, int timeout_ms) override {
    std::unique_lock lock(mutex_);
    ended_.wait_for(lock, std::chrono::milliseconds(timeout_ms), [this] { return woken_ || !ends_.empty(); });
    woken_ = false;
    under_way_ -= static_cast<uint32_t>(ends_.size());
    ends.insert(ends.end(), ends_.begin(), ends_.end());
    ends_.clear();
  }
  void wake() override {
    {
      const std::lock_guard lock(mutex_);
      woken_ = true;
    }
    ended_.notify_one();
  }
  std::string description() const override {
    return std::to_string(threads_.size()) + " threads, because " + why_;
  }

 private:
  void work() {
    std::unique_lock lock(mutex_);
    for (;;) {
      wanted_.wait(lock, [this] { return stopping_ || !todo_.empty(); });
      if (stopping_) return;
      const Io io = todo_.front();
      todo_.pop_front();
      lock.unlock();
      const IoEnd end{io.cookie, carry_out(fd_, io)};
      lock.lock();
      ends_.push_back(end);
      ended_.notify_one();
    }
  }

  const int fd_;
  const uint32_t depth_;
  const std::string why_;
  std::mutex mutex_;
  std::condition_variable wanted_, ended_;
  std::deque<Io> todo_;
  std::vector<IoEnd> ends_;
  uint32_t under_way_ = 0;
  bool woken_ = false, stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<IoQueue> open_thread_queue(int fd, uint32_t depth, uint32_t threads, std::string why) {
  return std::make_unique<ThreadQueue>(fd, depth, threads, std::move(why));
}

}  // namespace mooncache::store::disk
