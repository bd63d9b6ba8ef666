// A getaddrinfo in the place of the system's: names below ".fake" are 127.0.0.1, those that begin with
// "slow" once the gate is open. All else goes to the system. One file of a test program includes this.
#pragma once

#include <arpa/inet.h>
#include <dlfcn.h>
#include <netdb.h>

#include <condition_variable>
#include <map>
#include <mutex>
#include <string>
#include <string_view>

namespace mooncache::testing {

class FakeNames {
 public:
  static FakeNames& get() {
    static auto* names = new FakeNames;  // threads may look up names until the process ends
    return *names;
  }
  void open(bool is_open) {
    const std::lock_guard lock(mutex_);
    open_ = is_open;
    ++openings_;
    changed_.notify_all();
  }
  // Lookups of a name that began.
  int asked(const std::string& name) {
    const std::lock_guard lock(mutex_);
    return asked_[name];
  }
  // Until this many lookups wait at the gate.
  bool wait_for_waiting(int count) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, kPatience, [&] { return waiting_ == count; });
  }

  int answer(const std::string& name, const char* service, const addrinfo* hints, addrinfo** found) {
    if (name.starts_with("slow")) pass_gate(name);
    addrinfo numeric = *hints;
    numeric.ai_flags |= AI_NUMERICHOST;
    return system()("127.0.0.1", service, &numeric, found);
  }
  using Function = int (*)(const char*, const char*, const addrinfo*, addrinfo**);
  static Function system() {
    static const auto function = reinterpret_cast<Function>(dlsym(RTLD_NEXT, "getaddrinfo"));
    return function;
  }

 private:
  static constexpr std::chrono::seconds kPatience{20};  // a test that fails must end
  void pass_gate(const std::string& name) {
    std::unique_lock lock(mutex_);
    ++asked_[name];
    ++waiting_;
    changed_.notify_all();
    const int before = openings_;
    (void)changed_.wait_for(lock, kPatience, [&] { return open_ || openings_ != before; });
    --waiting_;
    changed_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = false;
  int openings_ = 0;
  int waiting_ = 0;
  std::map<std::string, int> asked_;
};

}  // namespace mooncache::testing

extern "C" __attribute__((visibility("default"))) int getaddrinfo(const char* host, const char* service,
                                                                  const addrinfo* hints, addrinfo** found) {
  using Names = mooncache::testing::FakeNames;
  const std::string name = host != nullptr ? host : "";
  if (!name.ends_with(".fake") || (hints->ai_flags & AI_NUMERICHOST) != 0) {
    return Names::system()(host, service, hints, found);
  }
  return Names::get().answer(name, service, hints, found);
}
