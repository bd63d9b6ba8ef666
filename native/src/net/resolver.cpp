#include "net/resolver.h"

#include <netdb.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>

namespace mooncache::net {

namespace {

struct FreeAddresses {
  void operator()(addrinfo* list) const { freeaddrinfo(list); }
};

// `error` is that of getaddrinfo.
Lookup::Addresses resolve_by_system(const std::string& host, uint16_t port, int flags, int& error) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV | flags;
  addrinfo* list = nullptr;
  error = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &list);
  if (error != 0) return {Code::kNodeUnavailable, "resolving " + host + ": " + gai_strerror(error)};
  const std::unique_ptr<addrinfo, FreeAddresses> owned(list);
  std::vector<SocketAddress> found;
  for (const addrinfo* at = list; at != nullptr; at = at->ai_next) {
    SocketAddress address;
    if (at->ai_addrlen > sizeof address.storage) continue;
    std::memcpy(&address.storage, at->ai_addr, at->ai_addrlen);
    address.size = at->ai_addrlen;
    found.push_back(address);
  }
  if (found.empty()) return {Code::kNodeUnavailable, host + " has no address"};
  return found;
}

}  // namespace

class ResolverThreads {
 public:
  std::shared_ptr<Lookup> add(const std::string& host, uint16_t port, std::shared_ptr<Lookup> made) {
    const std::lock_guard lock(mutex_);
    for (const auto& lookup : running_) {
      if (lookup->is_of(host, port)) return lookup;
    }
    // so that the queue is no longer than those who wait are many
    std::erase_if(waiting_, [](const std::weak_ptr<Lookup>& lookup) { return lookup.expired(); });
    for (const auto& waiting : waiting_) {
      if (auto lookup = waiting.lock(); lookup && lookup->is_of(host, port)) return lookup;
    }
    waiting_.push_back(made);
    if (threads_ == kResolverThreads) return made;
    try {
      std::thread([this] { run(); }).detach();  // waits for the lock
      ++threads_;
    } catch (const std::system_error& error) {
      if (threads_ > 0) return made;  // those that there are take it
      waiting_.pop_back();
      made->finish({Code::kNodeUnavailable, "resolving " + host + ": no thread: " + error.what()});
    }
    return made;
  }

  // A forked child has none of its parent's threads, and may have its lock: it begins anew.
  static ResolverThreads& of_this_process() {
    static std::atomic<ResolverThreads*> current{nullptr};
    ResolverThreads* known = current.load(std::memory_order_acquire);
    while (known == nullptr || known->owner_ != getpid()) {
      auto made = std::make_unique<ResolverThreads>();
      // never deleted: a thread may be in getaddrinfo when the process ends
      if (current.compare_exchange_strong(known, made.get(), std::memory_order_acq_rel))
        return *made.release();
    }
    return *known;
  }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    for (;;) {
      std::shared_ptr<Lookup> lookup;
      while (!lookup && !waiting_.empty()) {
        lookup = waiting_.front().lock();
        waiting_.pop_front();
      }
      if (!lookup) {
        --threads_;
        return;
      }
      running_.push_back(lookup);
      lock.unlock();
      int error = 0;
      auto addresses = resolve_by_system(lookup->host_, lookup->port_, 0, error);
      lock.lock();
      std::erase(running_, lookup);
      lookup->finish(std::move(addresses));
    }
  }

  const pid_t owner_ = getpid();
  std::mutex mutex_;
  std::deque<std::weak_ptr<Lookup>> waiting_;
  std::vector<std::shared_ptr<Lookup>> running_;
  int threads_ = 0;
};

void Lookup::finish(Addresses addresses) {
  addresses_ = std::move(addresses);
  done_.store(true, std::memory_order_release);
  if (event_.valid()) (void)eventfd_write(event_.get(), 1);  // it is never read: it stays readable
}

std::shared_ptr<Lookup> look_up(const std::string& host, uint16_t port) {
  auto lookup = std::make_shared<Lookup>(host, port);
  int error = 0;
  auto numeric = resolve_by_system(host, port, AI_NUMERICHOST, error);
  if (error != EAI_NONAME) return lookup->finish(std::move(numeric)), lookup;
  lookup->event_ = UniqueFd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!lookup->event_.valid()) {
    lookup->finish({Code::kNodeUnavailable, "resolving " + host + ": eventfd: " + errno_text(errno)});
    return lookup;
  }
  return ResolverThreads::of_this_process().add(host, port, lookup);
}

}  // namespace mooncache::net
