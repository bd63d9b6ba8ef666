// A log in an object store: one object for its superblock, one for each segment. A segment's object is its
// bytes without what lies between the last record and the footer:
//
//   <log>/superblock
//   <log>/<number>-<sequence>-<used>-<footer>     all hexadecimal; `used` bytes from the segment's begin,
//   then
//                                                 `footer` bytes from its end (0: the segment is still
//                                                 written)
//
//   <log>/<number>-<sequence>-0-0                 empty: this writing was given up, whatever else is there of
//   it.
//                                                 It goes after the objects that it speaks of
//
// An object is written once. More of a segment is another object, which takes the place of the former one.
// Only a purge writes an object again, with less in it. Sizes and names are hostile like all bytes: what does
// not fit is no object of ours, and every record is checked when it is read.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "store/disk/format.h"
#include "store/disk/object_requests.h"
#include "store/disk/shared_folder.h"

namespace mooncache::store::disk {

struct SegmentObject {
  uint32_t number = 0;
  uint64_t sequence = 0, used = 0, footer = 0;
  uint64_t size() const { return used + footer; }
  bool is_end() const { return used == 0; }
  std::string name(std::string_view log) const;
  static std::optional<SegmentObject> parse(std::string_view name);  // without the log's
  bool operator==(const SegmentObject&) const = default;
  // Of two objects of one segment, the later one.
  bool operator<(const SegmentObject& other) const {
    if (sequence != other.sequence) return sequence < other.sequence;
    if ((footer > 0) != (other.footer > 0)) return other.footer > 0;
    return used < other.used;
  }
};

std::string superblock_name(std::string_view log);

struct ObjectListing {
  uint64_t superblock = 0;                     // its version; 0: there is none
  uint64_t version = 0;                        // of all of it
  std::map<uint32_t, SegmentObject> segments;  // the latest of each
  // Those that are not the latest, or were given up, then the objects that say so.
  std::vector<SegmentObject> former;
};

// The logs whose names begin with `prefix`. 0, or an errno.
int list_logs(ObjectRequests& requests, const std::string& prefix, uint32_t timeout_ms,
              std::map<std::string, ObjectListing>& logs);

// The logs as others read them: each looks like one file, with zeros where no object is.
std::shared_ptr<SharedFolder> open_object_folder(std::shared_ptr<ObjectRequests> requests,
                                                 uint32_t timeout_ms);

}  // namespace mooncache::store::disk
