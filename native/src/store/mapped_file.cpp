#include "store/mapped_file.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "base/dax.h"

namespace mooncache::store {
namespace {

Status wrong(const std::string& path, const std::string& why) {
  return {Code::kConfigInvalid, "the arena " + path + " " + why};
}
Status refused(const std::string& path, const char* what, int error) {
  const bool full = error == ENOSPC || error == ENOMEM || error == EDQUOT;
  return {full ? Code::kNoSpace : Code::kConfigInvalid,
          "the arena " + path + ": " + what + ": " + std::strerror(error)};
}

std::string text_of(uint64_t bytes) {
  for (const auto& [unit, shift] : {std::pair{"GiB", 30}, {"MiB", 20}, {"KiB", 10}}) {
    if (bytes >> shift != 0 && (bytes & ((1ull << shift) - 1)) == 0)
      return std::to_string(bytes >> shift) + " " + unit;
  }
  return std::to_string(bytes) + " bytes";
}

Status check_rights(const std::string& path, const struct stat& facts) {
  if (S_ISCHR(facts.st_mode)) {
    if ((facts.st_mode & 0007) == 0) return Status::ok();
    return wrong(path, "may be opened by every user, who could read and change all blocks; chmod o= it");
  }
  if (facts.st_uid != ::geteuid())
    return wrong(path, "belongs to another user, who could truncate it under the node; chown it");
  if ((facts.st_mode & 0077) != 0)
    return wrong(path, "may be opened by other users, who could read and change all blocks; chmod 600 it");
  return Status::ok();
}

}  // namespace

Result<std::unique_ptr<MappedFile>> MappedFile::open(const MappedFileOptions& options) {
  std::unique_ptr<MappedFile> file(new MappedFile);
  Status status = file->open_path(options);
  if (status) status = file->is_device_ ? file->measure_device(options) : file->measure_file(options);
  if (status) status = file->map(options.huge_pages);
  if (status) status = file->share();
  if (!status) return status;
  return file;
}

MappedFile::~MappedFile() {
  guard_ = BusGuard();
  if (data_ != nullptr) (void)::munmap(data_, info_.size_bytes);
  for (const int fd : {fd_ro_, fd_rw_, fd_}) {
    if (fd >= 0) (void)::close(fd);
  }
}

Status MappedFile::open_path(const MappedFileOptions& options) {
  const std::string& path = options.path;
  if (!path.starts_with('/')) return wrong(path, "must be an absolute path");
  struct stat facts {};
  if (::lstat(path.c_str(), &facts) != 0) {
    if (errno != ENOENT && errno != ENOTDIR) return refused(path, "it cannot be looked at", errno);
    return wrong(path, "does not exist; make it (fallocate -l 64GiB, chmod 600), or name a folder");
  }
  info_.description = path;
  if (S_ISDIR(facts.st_mode)) return open_unnamed(path);
  if (S_ISLNK(facts.st_mode))
    return wrong(path, "is a symbolic link, which could be pointed elsewhere; name what it leads to");
  if (S_ISBLK(facts.st_mode))
    return wrong(path, "is a block device; use device DAX (/dev/dax*), or a file on its file system");
  if (!S_ISREG(facts.st_mode) && !S_ISCHR(facts.st_mode))
    return wrong(path, "is neither a file nor a DAX device nor a folder");
  if (S_ISCHR(facts.st_mode) && !dax::is_device(options.sysfs, facts))
    return wrong(path, "is a character device, but not a DAX device (/dev/dax*)");
  if (Status rights = check_rights(path, facts); !rights) return rights;
  is_device_ = S_ISCHR(facts.st_mode);
  if (Status opened = open_named(path); !opened) return opened;
  struct stat found {};
  if (::fstat(fd_, &found) != 0 || found.st_dev != facts.st_dev || found.st_ino != facts.st_ino)
    return wrong(path, "was replaced while it was opened");
  return lock(path);
}

Status MappedFile::open_named(const std::string& path) {
  fd_ = ::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY);
  return fd_ >= 0 ? Status::ok() : refused(path, "it cannot be opened for reading and writing", errno);
}

// It has no name to be reached by, and it is gone with the process.
Status MappedFile::open_unnamed(const std::string& folder) {
  fd_ = ::open(folder.c_str(), O_RDWR | O_CLOEXEC | O_TMPFILE | O_EXCL, 0600);
  if (fd_ >= 0) return Status::ok();
  if (errno != EOPNOTSUPP && errno != EISDIR && errno != EINVAL)
    return refused(folder, "no file can be made in this folder", errno);
  std::string name = folder + "/mooncache-arena-XXXXXX";
  fd_ = ::mkostemp(name.data(), O_CLOEXEC);  // mode 0600
  if (fd_ < 0) return refused(folder, "no file can be made in this folder", errno);
  (void)::unlink(name.c_str());
  return Status::ok();
}

Status MappedFile::lock(const std::string& path) {
  if (::flock(fd_, LOCK_EX | LOCK_NB) == 0) return Status::ok();
  if (errno == EWOULDBLOCK) return wrong(path, "is in use by another process, probably another store node");
  return refused(path, "it cannot be locked", errno);
}

Status MappedFile::measure_device(const MappedFileOptions& options) {
  struct stat facts {};
  if (::fstat(fd_, &facts) != 0) return refused(options.path, "fstat", errno);
  const std::string about = dax::about(options.sysfs, facts.st_rdev);
  const uint64_t align = dax::page_bytes(options.sysfs, facts.st_rdev);
  const uint64_t there = dax::number_in(about + "/size");
  if (there == 0) return wrong(options.path, "has a size that the kernel does not tell (" + about + "/size)");
  if (options.size_bytes > there) {
    return wrong(options.path,
                 "has " + text_of(there) + ", and the capacity asks for " + text_of(options.size_bytes));
  }
  info_.kind = "dax";
  info_.page_bytes = align;
  info_.size_bytes = (options.size_bytes == 0 ? there : options.size_bytes) / align * align;
  if (info_.size_bytes == 0)
    return wrong(options.path, "is mapped in pieces of " + text_of(align) + ": the capacity is below one");
  return Status::ok();
}

Status MappedFile::measure_file(const MappedFileOptions& options) {
  struct stat facts {};
  struct statfs system {};
  if (::fstat(fd_, &facts) != 0 || ::fstatfs(fd_, &system) != 0) return refused(options.path, "fstat", errno);
  const auto magic = static_cast<uint32_t>(system.f_type);
  info_.page_bytes = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  if (magic == HUGETLBFS_MAGIC) {
    info_.kind = "hugetlbfs";
    info_.page_bytes = std::max(info_.page_bytes, static_cast<uint64_t>(system.f_bsize));
  } else {
    info_.kind = magic == TMPFS_MAGIC ? "tmpfs" : "file";
  }
#ifdef STATX_ATTR_DAX
  struct statx more {};
  if (info_.kind == "file" && ::statx(fd_, "", AT_EMPTY_PATH, STATX_BASIC_STATS, &more) == 0 &&
      (more.stx_attributes & STATX_ATTR_DAX) != 0)
    info_.kind = "fsdax";
#endif
  if (info_.kind == "file")
    info_.warning = "it is a file of a disk: the kernel writes changed blocks to the disk when it sees fit";
  const uint64_t wanted = options.size_bytes == 0 ? static_cast<uint64_t>(facts.st_size) : options.size_bytes;
  if (wanted == 0) return wrong(options.path, "is empty; set the capacity, or give the file its size");
  info_.size_bytes = wanted / info_.page_bytes * info_.page_bytes;
  if (info_.size_bytes == 0) {
    return wrong(options.path,
                 "is mapped in pieces of " + text_of(info_.page_bytes) + ": the capacity is below one");
  }
  return reserve(options.path);
}

// Holes included: a page that the file system cannot provide would be a SIGBUS at the first write.
Status MappedFile::reserve(const std::string& path) {
  const auto size = static_cast<off_t>(info_.size_bytes);
  int error = 0;
  do {
    error = ::fallocate(fd_, 0, 0, size) == 0 ? 0 : errno;
  } while (error == EINTR);
  if (error == 0) return Status::ok();
  if (error == ENOSPC || error == ENOMEM || error == EDQUOT) {
    struct statfs system {};
    const uint64_t free = ::fstatfs(fd_, &system) == 0 ? system.f_bavail * system.f_bsize : 0;
    return {Code::kNoSpace, "the arena " + path + ": there is no room for " + text_of(info_.size_bytes) +
                                ", its file system has " + text_of(free) + " left"};
  }
  struct stat facts {};
  const bool whole = ::fstat(fd_, &facts) == 0 && facts.st_size >= size && facts.st_blocks * 512 >= size;
  if (error == EOPNOTSUPP && whole) return Status::ok();
  if (error == EOPNOTSUPP) {
    return wrong(path, "lies on a file system that cannot reserve room; fill it first (dd if=/dev/zero), " +
                           text_of(info_.size_bytes));
  }
  return refused(path, "room for it cannot be reserved", error);
}

Status MappedFile::map(bool huge_pages) {
  void* at = ::mmap(nullptr, info_.size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
  if (at == MAP_FAILED) return refused(info_.description, "it cannot be mapped", errno);
  data_ = static_cast<std::byte*>(at);
  tail_begin_ = info_.size_bytes;
  guard_ = BusGuard(data_, info_.size_bytes, info_.page_bytes);
  if (!guard_.active()) return wrong(info_.description, "is one mapping more than this process can guard");
  if (huge_pages) (void)::madvise(at, info_.size_bytes, MADV_HUGEPAGE);  // advice only
  (void)::madvise(at, info_.size_bytes, MADV_DONTDUMP);
  return Status::ok();
}

// A file could shrink under another process, where nothing guards the mapping; a device cannot.
Status MappedFile::share() {
  if (!is_device_) {
    info_.why_not_shared = "the node's arena is a file, which could be truncated under its readers";
    return Status::ok();
  }
  const std::string self = "/proc/self/fd/" + std::to_string(fd_);
  fd_ro_ = ::open(self.c_str(), O_RDONLY | O_CLOEXEC);
  fd_rw_ = ::open(self.c_str(), O_RDWR | O_CLOEXEC);
  return fd_ro_ >= 0 && fd_rw_ >= 0 ? Status::ok()
                                    : refused(info_.description, "it cannot be reopened", errno);
}

uint64_t MappedFile::lost_bytes() {
  const std::lock_guard hold(mutex_);
  struct stat facts {};
  if (!is_device_ && ::fstat(fd_, &facts) == 0 && static_cast<uint64_t>(facts.st_size) < tail_begin_) {
    const uint64_t page = info_.page_bytes;
    const uint64_t begin = (static_cast<uint64_t>(facts.st_size) + page - 1) / page * page;
    constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
    if (begin < tail_begin_ &&
        ::mmap(data_ + begin, tail_begin_ - begin, PROT_READ | PROT_WRITE, kFlags, -1, 0) != MAP_FAILED)
      tail_begin_ = begin;
  }
  return std::min(info_.size_bytes, guard_.lost_bytes() + (info_.size_bytes - tail_begin_));
}

}  // namespace mooncache::store
