#include "store/disk/shared_folder.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

namespace mooncache::store::disk {

namespace {

class PosixFile final : public SharedFile {
 public:
  PosixFile(int fd, Version version) : fd_(fd), version_(version) {}
  ~PosixFile() override { ::close(fd_); }
  PosixFile(const PosixFile&) = delete;
  PosixFile& operator=(const PosixFile&) = delete;
  int64_t read(uint64_t offset, Slice to) override {
    ssize_t got = -1;
    do {
      got = ::pread(fd_, to.data, to.size, static_cast<off_t>(offset));
    } while (got < 0 && errno == EINTR);
    return got < 0 ? -static_cast<int64_t>(errno) : got;
  }
  Version version() const override { return version_; }

 private:
  const int fd_;
  const Version version_;
};

class PosixFolder final : public SharedFolder {
 public:
  explicit PosixFolder(std::string path) : path_(std::move(path)) {}

  int list(std::vector<std::string>& names, size_t most) override {
    DIR* const folder = ::opendir(path_.c_str());
    if (folder == nullptr) return errno;
    int error = 0;
    for (errno = 0; names.size() < most; errno = 0) {
      const dirent* const entry = ::readdir(folder);
      if (entry == nullptr) {
        error = errno;
        break;
      }
      const std::string_view name(entry->d_name);
      if (name.ends_with(kSharedSuffix) && !name.starts_with('.')) names.emplace_back(name);
    }
    ::closedir(folder);
    return error;
  }

  // Past the page cache, which may be behind what the writer wrote on another host; opening asks the file's
  // server for its times. What is no file, like a FIFO, must not block.
  std::shared_ptr<SharedFile> open(const std::string& name, int& error) override {
    const std::string path = path_ + "/" + name;
    constexpr int kFlags = O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK;
    int fd = ::open(path.c_str(), kFlags | O_DIRECT);
    if (fd < 0 && errno == EINVAL) fd = ::open(path.c_str(), kFlags);
    if (fd < 0) {
      error = errno;
      return nullptr;
    }
    struct stat info {};
    const bool known = ::fstat(fd, &info) == 0;
    if (!known || !S_ISREG(info.st_mode)) {
      error = known ? EINVAL : errno;
      ::close(fd);
      return nullptr;
    }
    return std::make_shared<PosixFile>(
        fd, SharedFile::Version{static_cast<uint64_t>(info.st_ino), static_cast<uint64_t>(info.st_size),
                                static_cast<uint64_t>(info.st_mtim.tv_sec) * 1'000'000'000 +
                                    static_cast<uint64_t>(info.st_mtim.tv_nsec)});
  }

 private:
  const std::string path_;
};

}  // namespace

std::shared_ptr<SharedFolder> open_shared_folder(std::string path) {
  return std::make_shared<PosixFolder>(std::move(path));
}

std::string_view unfit_for_a_name(std::string_view node_id) {
  if (node_id.empty() || node_id.starts_with('.')) return "it is empty or begins with a dot";
  const bool sound = std::all_of(node_id.begin(), node_id.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' ||
           c == '_' || c == '-';
  });
  return sound ? "" : "only letters, digits, '.', '_' and '-' are allowed";
}

}  // namespace mooncache::store::disk
