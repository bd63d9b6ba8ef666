#include "transfer/mapped_regions.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <iterator>

namespace mooncache::transfer {

namespace {

bool holds(int fd, uint64_t size) {
  struct stat info {};
  const int seals = ::fcntl(fd, F_GET_SEALS);
  return seals >= 0 && (seals & F_SEAL_SHRINK) != 0 && ::fstat(fd, &info) == 0 && info.st_size >= 0 &&
         static_cast<uint64_t>(info.st_size) >= size;
}

}  // namespace

Status MappedRegions::add(const wire::MappedRegion& region, std::vector<net::UniqueFd> fds) {
  const size_t wanted = region.writable ? 2 : 1;
  if (fds.size() != wanted || !holds(fds.back().get(), region.size))
    return {Code::kTransportUnavailable, "the peer passed no sealed memory of the size that it names"};
  if (by_base_.contains(region.base)) return Status::ok();
  const int protection = region.writable ? PROT_READ | PROT_WRITE : PROT_READ;
  void* const data = ::mmap(nullptr, region.size, protection, MAP_SHARED, fds.back().get(), 0);
  if (data == MAP_FAILED)
    return {Code::kTransportUnavailable, "cannot map the peer's memory: " + net::errno_text(errno)};
  (void)::madvise(data, region.size, MADV_DONTFORK);
  by_base_.emplace(region.base, Mapping{static_cast<std::byte*>(data), region.size, region.writable});
  return Status::ok();
}

bool MappedRegions::covers(uint64_t address) const {
  auto after = by_base_.upper_bound(address);
  return after != by_base_.begin() && address - std::prev(after)->first < std::prev(after)->second.size;
}

std::byte* MappedRegions::find(uint64_t address, uint64_t length, bool write) const {
  auto after = by_base_.upper_bound(address);
  if (after == by_base_.begin()) return nullptr;
  const auto& [base, mapping] = *std::prev(after);
  const uint64_t offset = address - base;
  if (offset >= mapping.size || length > mapping.size - offset || (write && !mapping.writable))
    return nullptr;
  return mapping.data + offset;
}

void MappedRegions::clear() {
  for (const auto& [base, mapping] : by_base_) ::munmap(mapping.data, mapping.size);
  by_base_.clear();
}

}  // namespace mooncache::transfer
