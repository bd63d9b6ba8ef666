// The directory that nodes share, as those see it who read what others wrote: which logs there are, and bytes
// of them. Every call may block for as long as the file system does, so only threads that may be lost make
// them.
//
// An interface, so that a test puts its own in place and delays, cuts or refuses what it likes.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "mooncache/bytes.h"

namespace mooncache::store::disk {

// A writer's log in the directory: its node's name with this behind it.
inline constexpr std::string_view kSharedSuffix = ".mooncache";

class SharedFile {
 public:
  struct Version {
    uint64_t inode = 0, size_bytes = 0, changed_ns = 0;
    bool operator==(const Version&) const = default;
  };
  virtual ~SharedFile() = default;
  // Bytes read, or -errno. Offset, size and address are multiples of a page.
  virtual int64_t read(uint64_t offset, Slice to) = 0;
  // As of when it was opened.
  virtual Version version() const = 0;
  // Of a segment's writing, where it is known without a read; 0: the segment is not in use.
  virtual std::optional<uint64_t> sequence(uint32_t /*number*/) const { return std::nullopt; }
};

class SharedFolder {
 public:
  virtual ~SharedFolder() = default;
  // Names of the logs, in no order, `most` at most; 0 or an errno.
  virtual int list(std::vector<std::string>& names, size_t most) = 0;
  // Null with an errno when it is not a file, or cannot be read.
  virtual std::shared_ptr<SharedFile> open(const std::string& name, int& error) = 0;
};

std::shared_ptr<SharedFolder> open_shared_folder(std::string path);

// Why a node's name cannot name its log; empty: it can.
std::string_view unfit_for_a_name(std::string_view node_id);

}  // namespace mooncache::store::disk
