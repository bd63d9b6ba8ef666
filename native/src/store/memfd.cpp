#include "store/memfd.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

namespace mooncache::store {
namespace {

Status refused(const char* what) {
  return {Code::kNoSpace, std::string(what) + ": " + std::strerror(errno)};
}

}  // namespace

Result<Memfd> Memfd::create(const char* name, uint64_t size_bytes, bool huge_pages) {
  const auto page = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  if (size_bytes == 0 || size_bytes > (1ull << 46))
    return {Code::kConfigInvalid, "memory file: size out of range"};
  Memfd file;
  file.size_bytes_ = (size_bytes + page - 1) / page * page;
  file.fd_rw_ = ::memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (file.fd_rw_ < 0) return refused("memfd_create");
  // Without this, a peer of another user could reopen its read-only descriptor for writing.
  if (::fchmod(file.fd_rw_, 0600) != 0) return refused("fchmod");
  if (::ftruncate(file.fd_rw_, static_cast<off_t>(file.size_bytes_)) != 0) return refused("ftruncate");
  if (::fcntl(file.fd_rw_, F_ADD_SEALS, F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL) != 0)
    return refused("F_ADD_SEALS");
  const std::string path = "/proc/self/fd/" + std::to_string(file.fd_rw_);
  file.fd_ro_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file.fd_ro_ < 0) return refused("reopening a memory file");
  void* at = ::mmap(nullptr, file.size_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file.fd_rw_, 0);
  if (at == MAP_FAILED) return refused("mmap");
  file.data_ = static_cast<std::byte*>(at);
  // Advice only: the kernel may have huge pages for shared memory switched off.
  if (huge_pages) (void)::madvise(at, file.size_bytes_, MADV_HUGEPAGE);
  (void)::madvise(at, file.size_bytes_, MADV_DONTDUMP);
  return file;
}

Memfd& Memfd::operator=(Memfd&& other) noexcept {
  if (this == &other) return *this;
  close();
  data_ = std::exchange(other.data_, nullptr);
  size_bytes_ = std::exchange(other.size_bytes_, 0);
  fd_ro_ = std::exchange(other.fd_ro_, -1);
  fd_rw_ = std::exchange(other.fd_rw_, -1);
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
  data_ = nullptr;
  fd_ro_ = fd_rw_ = -1;
}

}  // namespace mooncache::store
