// The node's own log in an object store. What the device writes goes into a file of this host first, the
// spool; a thread of the queue puts each segment into the store when it is sealed, and gives its room in the
// file back. From then on its records are read in the store, by range.
//
// To the device it is a disk. What it promises beyond that:
//   - the device's thread never waits for the store. A read that the store does not answer is a read that
//     hangs: the device has no blocks after `stall_ms`, and has them again when the store answers;
//   - a segment that is still written is put there, too, when it is `upload_ms` old, and at once when a
//     removal waits for it: `lasting` syncs end when the store has what was written before them;
//   - a segment that is given up is so for all nodes before the device hears that its header is wiped, and
//   its
//     objects are deleted before it is used again;
//   - what the store does not take stays in the file, `most_unsent_bytes` of it; then no blocks are taken.
#pragma once

#include <memory>
#include <string>

#include "store/disk/io_queue.h"
#include "store/disk/object_requests.h"

namespace mooncache::store::disk {

struct SpoolOptions {
  std::shared_ptr<ObjectRequests> requests;
  std::string log;  // its name in the store: the node's, with kSharedSuffix
  std::string node_id;
  uint64_t most_unsent_bytes = 1 << 30;
  uint32_t timeout_ms = 2000;  // of a read
  uint32_t upload_ms = 10'000;
};

// Before the device opens the spool: what the store has of the log and the file has not (it is another host,
// or another file) is put into the file, headers and footers alone. CONFIG_INVALID: in use, or something else
// lies there; else the store does not answer.
Status prepare_spool(const std::string& path, const SpoolOptions& options);

std::unique_ptr<IoQueue> open_spool_queue(int fd, std::span<const iovec> buffers, bool allow_uring,
                                          SpoolOptions options);

}  // namespace mooncache::store::disk
