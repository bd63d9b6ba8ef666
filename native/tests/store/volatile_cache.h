// A disk with a cache that a power cut empties: what was written lies on it for good only after a sync.
// Before that, a power cut leaves any part of it, in any order.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <random>
#include <span>
#include <vector>

namespace mooncache::test {

class VolatileCache {
 public:
  static constexpr size_t kSectorBytes = 512;  // written as a whole or not at all

  // `fd` without O_DIRECT; it stays the caller's. Reads find there what was written, synced or not.
  explicit VolatileCache(int fd) : fd_(fd) {}

  // Whole sectors. False: the file did not take them.
  bool write(uint64_t cookie, uint64_t offset, std::span<const std::byte> bytes) {
    for (size_t at = 0; at < bytes.size(); at += kSectorBytes) {
      const auto [known, fresh] = lasting_.try_emplace(offset + at);
      if (fresh && !move(false, offset + at, known->second)) return false;
    }
    writes_.push_back({cookie, offset, {bytes.begin(), bytes.end()}, false});
    return ::pwrite(fd_, bytes.data(), bytes.size(), static_cast<off_t>(offset)) ==
           static_cast<ssize_t>(bytes.size());
  }
  // The writer knows that this write has ended.
  void report(uint64_t cookie) {
    for (Written& one : writes_) one.is_reported = one.is_reported || one.cookie == cookie;
  }
  // Writes whose end was not reported before may be behind it.
  void sync() {
    for (const Written& one : writes_) {
      if (one.is_reported) put(one, [] { return true; });
    }
    std::erase_if(writes_, [](const Written& one) { return one.is_reported; });
    if (writes_.empty()) lasting_.clear();
  }
  // What was not synced is lost, whole, or torn, in any order.
  void cut(std::mt19937_64& random) {
    std::shuffle(writes_.begin(), writes_.end(), random);
    for (const Written& one : writes_) {
      const uint64_t fate = random() % 3;
      if (fate > 0) put(one, [&] { return fate == 1 || random() % 2 == 0; });
    }
    for (auto& [offset, sector] : lasting_) (void)move(true, offset, sector);
    writes_.clear();
    lasting_.clear();
  }

 private:
  using Sector = std::array<std::byte, kSectorBytes>;
  struct Written {
    uint64_t cookie = 0, offset = 0;
    std::vector<std::byte> bytes;
    bool is_reported = false;
  };
  template <typename Arrives>
  void put(const Written& one, const Arrives& arrives) {
    for (size_t at = 0; at < one.bytes.size(); at += kSectorBytes) {
      if (arrives()) std::memcpy(lasting_.at(one.offset + at).data(), one.bytes.data() + at, kSectorBytes);
    }
  }
  bool move(bool is_write, uint64_t offset, Sector& sector) const {
    const auto at = static_cast<off_t>(offset);
    const ssize_t moved = is_write ? ::pwrite(fd_, sector.data(), sector.size(), at)
                                   : ::pread(fd_, sector.data(), sector.size(), at);
    return moved == static_cast<ssize_t>(sector.size());
  }

  const int fd_;
  std::vector<Written> writes_;         // since they were synced, in their order
  std::map<uint64_t, Sector> lasting_;  // what a power cut leaves where they were written
};

}  // namespace mooncache::test
