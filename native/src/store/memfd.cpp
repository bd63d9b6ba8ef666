#include "store/memfd.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <utility>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14
#endif
#ifndef MFD_HUGE_2MB
#define MFD_HUGE_2MB (21u << 26)
#endif

namespace mooncache::store {
namespace {

constexpr uint64_t kHugePageBytes = 2 << 20;
constexpr int kNumaNodesMax = 1024;

Status refused(const std::string& what) {
  return {Code::kNoSpace, what + ": " + std::strerror(errno)};
}

// The word in brackets: "always within_size [advise] never" -> "advise". "" when the file is not there.
std::string chosen_in(const char* path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  const size_t begin = line.find('['), end = line.find(']');
  return begin == std::string::npos || end < begin ? "" : line.substr(begin + 1, end - begin - 1);
}

}  // namespace

Result<Memfd> Memfd::create(const char* name, uint64_t size_bytes, const MemfdOptions& options) {
  if (size_bytes == 0 || size_bytes > (1ull << 46))
    return {Code::kConfigInvalid, "memory file: size out of range"};
  Memfd file;
  Status made = options.huge_pages ? file.make(name, size_bytes, true) : Status{Code::kNoSpace, {}};
  if (!made) {
    file.close();
    made = file.make(name, size_bytes, false);
    if (made && options.huge_pages) file.choose_transparent();
  }
  if (made) made = file.finish(options);
  if (!made) return made;
  return file;
}

Result<Memfd> Memfd::adopt(int fd, uint64_t size_bytes, const MemfdOptions& options) {
  Memfd file;
  if (Status taken = file.take(fd, size_bytes); !taken) return taken;
  if (options.huge_pages && file.pages_ != Pages::kHuge) file.choose_transparent();
  if (Status finished = file.finish(options); !finished) return finished;
  return file;
}

Status Memfd::finish(const MemfdOptions& options) {
  if (options.numa_node >= 0) {
    if (Status bound = bind(options.numa_node); !bound) return bound;
  }
  (void)::madvise(data_, size_bytes_, MADV_DONTDUMP);
  return Status::ok();
}

// The size is sealed, so what is looked at once does not change.
Status Memfd::take(int fd, uint64_t size_bytes) {
  constexpr int kSeals = F_SEAL_GROW | F_SEAL_SHRINK;
  struct stat facts {};
  struct statfs system {};
  if (::fstat(fd, &facts) != 0 || ::fstatfs(fd, &system) != 0)
    return {Code::kConfigInvalid, std::string("a kept memory file: ") + std::strerror(errno)};
  const int seals = ::fcntl(fd, F_GET_SEALS);
  if (!S_ISREG(facts.st_mode) || facts.st_uid != ::geteuid() || (facts.st_mode & 0077) != 0 || seals < 0 ||
      (seals & kSeals) != kSeals)
    return {Code::kConfigInvalid, "what was kept is no sealed memory file of this user"};
  const bool huge = static_cast<uint32_t>(system.f_type) == HUGETLBFS_MAGIC;
  page_bytes_ = static_cast<uint64_t>(huge ? system.f_bsize : ::sysconf(_SC_PAGESIZE));
  pages_ = huge ? Pages::kHuge : Pages::kSystem;
  size_bytes_ = (size_bytes + page_bytes_ - 1) / page_bytes_ * page_bytes_;
  if (static_cast<uint64_t>(facts.st_size) != size_bytes_)
    return {Code::kConfigInvalid, "the kept memory has another size"};
  fd_rw_ = ::fcntl(fd, F_DUPFD_CLOEXEC, 0);
  if (fd_rw_ < 0) return refused("fcntl");
  return open_and_map();
}

// Descriptors that are copies of one, here or in another process, share a lock: each opens its own.
Status Memfd::keep(uint64_t number) {
  const std::string path = "/proc/self/fd/" + std::to_string(fd_rw_);
  const int own = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (own < 0) return refused("reopening a memory file");
  struct flock lock {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = static_cast<off_t>(number);
  lock.l_len = 1;
  if (::fcntl(own, F_OFD_SETLK, &lock) != 0) {
    const int error = errno;
    ::close(own);
    if (error == EAGAIN || error == EACCES)
      return {Code::kAlreadyExists, "a process that lives uses the kept memory"};
    errno = error;
    return refused("locking a memory file");
  }
  kept_fd_ = std::exchange(fd_rw_, own);
  return Status::ok();
}

bool Memfd::is_locked(uint64_t from, uint64_t below) const {
  if (from >= below) return false;
  struct flock lock {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = static_cast<off_t>(from);
  lock.l_len = static_cast<off_t>(below - from);
  return ::fcntl(fd_rw_, F_OFD_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

// Of huge pages the mapping takes its whole size out of the pool, or fails: none is missing later.
Status Memfd::make(const char* name, uint64_t size_bytes, bool huge) {
  page_bytes_ = huge ? kHugePageBytes : static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  size_bytes_ = (size_bytes + page_bytes_ - 1) / page_bytes_ * page_bytes_;
  pages_ = huge ? Pages::kHuge : Pages::kSystem;
  fd_rw_ = ::memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING | (huge ? MFD_HUGETLB | MFD_HUGE_2MB : 0u));
  if (fd_rw_ < 0) return refused("memfd_create");
  // Without this, a peer of another user could reopen its read-only descriptor for writing.
  if (::fchmod(fd_rw_, 0600) != 0) return refused("fchmod");
  if (::ftruncate(fd_rw_, static_cast<off_t>(size_bytes_)) != 0) return refused("ftruncate");
  if (::fcntl(fd_rw_, F_ADD_SEALS, F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL) != 0)
    return refused("F_ADD_SEALS");
  return open_and_map();
}

Status Memfd::open_and_map() {
  const std::string path = "/proc/self/fd/" + std::to_string(fd_rw_);
  fd_ro_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd_ro_ < 0) return refused("reopening a memory file");
  void* at = ::mmap(nullptr, size_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd_rw_, 0);
  if (at == MAP_FAILED) return refused("mmap");
  data_ = static_cast<std::byte*>(at);
  return Status::ok();
}

// The kernel takes the advice only where its administrator allows huge pages for shared memory.
void Memfd::choose_transparent() {
  const std::string all = chosen_in("/sys/kernel/mm/transparent_hugepage/shmem_enabled");
  const std::string size = chosen_in("/sys/kernel/mm/transparent_hugepage/hugepages-2048kB/shmem_enabled");
  const std::string& rule = size.empty() || size == "inherit" || all == "force" ? all : size;
  const bool allowed = rule == "always" || rule == "within_size" || rule == "advise" || rule == "force";
  if (allowed && ::madvise(data_, size_bytes_, MADV_HUGEPAGE) == 0) {
    pages_ = Pages::kTransparent;
    return;
  }
  why_not_huge_ =
      "no huge pages: the host's pool (vm.nr_hugepages) has too few, and transparent ones of shared memory "
      "(/sys/kernel/mm/transparent_hugepage/shmem_enabled) are " +
      (rule.empty() ? std::string("not there") : "set to \"" + rule + "\"");
}

Status Memfd::bind(int numa_node) {
  constexpr int kBits = 8 * sizeof(unsigned long);
  unsigned long nodes[kNumaNodesMax / kBits] = {};
  if (numa_node < kNumaNodesMax) nodes[numa_node / kBits] = 1ul << (numa_node % kBits);
  // One more than there are: the kernel reads a bit less than that.
  if (::syscall(SYS_mbind, data_, size_bytes_, MPOL_BIND, nodes, kNumaNodesMax + 1, 0) == 0)
    return Status::ok();
  return {Code::kConfigInvalid,
          "NUMA node " + std::to_string(numa_node) + " gives no memory: " + std::strerror(errno)};
}

Status Memfd::populate(uint64_t offset, uint64_t length) {
  int error = 0;
  do {
    error = ::madvise(data_ + offset, length, MADV_POPULATE_WRITE) == 0 ? 0 : errno;
  } while (error == EINTR || error == EAGAIN);
  if (error == EINVAL) {  // an older kernel
    do {
      error = ::fallocate(fd_rw_, 0, static_cast<off_t>(offset), static_cast<off_t>(length)) == 0 ? 0 : errno;
    } while (error == EINTR);
  }
  if (error == 0) return Status::ok();
  errno = error;
  return refused("the host has no memory left for the arena, which has " +
                 std::to_string(resident_bytes() >> 20) + " of " + std::to_string(size_bytes_ >> 20) +
                 " MiB");
}

Memfd& Memfd::operator=(Memfd&& other) noexcept {
  if (this == &other) return *this;
  close();
  data_ = std::exchange(other.data_, nullptr);
  size_bytes_ = std::exchange(other.size_bytes_, 0);
  page_bytes_ = other.page_bytes_;
  pages_ = other.pages_;
  why_not_huge_ = std::move(other.why_not_huge_);
  fd_ro_ = std::exchange(other.fd_ro_, -1);
  fd_rw_ = std::exchange(other.fd_rw_, -1);
  kept_fd_ = std::exchange(other.kept_fd_, -1);
  return *this;
}

uint64_t Memfd::resident_bytes() const {
  struct stat info {};
  if (fd_rw_ < 0 || ::fstat(fd_rw_, &info) != 0) return 0;
  return static_cast<uint64_t>(info.st_blocks) * 512;
}

void Memfd::close() {
  if (data_ != nullptr) ::munmap(data_, size_bytes_);
  if (fd_ro_ >= 0) ::close(fd_ro_);
  if (fd_rw_ >= 0) ::close(fd_rw_);
  if (kept_fd_ >= 0) ::close(kept_fd_);
  data_ = nullptr;
  fd_ro_ = fd_rw_ = kept_fd_ = -1;
}

}  // namespace mooncache::store
