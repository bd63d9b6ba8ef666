// The start of a spool: the file and the store are compared. The store decides what was sealed, because the
// node may have run on another host meanwhile; the file has what had not been put there yet.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "store/disk/file.h"
#include "store/disk/segment_reader.h"
#include "store/disk/spool_state.h"

namespace mooncache::store::disk {

namespace {

constexpr size_t kFetchers = 8;

struct Spool {
  explicit Spool(int fd_in) : fd(fd_in) {}
  ~Spool() { ::close(fd); }
  Spool(const Spool&) = delete;
  Spool& operator=(const Spool&) = delete;
  const int fd;
};

struct Page4k {
  alignas(kPageBytes) std::array<std::byte, kPageBytes> bytes{};
};

Status silent(int error) {
  return {Code::kInternal, std::string("the object store does not answer: ") + std::strerror(error)};
}

std::optional<Superblock> superblock_of(int fd) {
  Page4k page;
  for (uint64_t copy = 0; copy < 2; ++copy) {
    if (!read_spool(fd, copy * kPageBytes, page.bytes)) continue;
    if (auto found = Superblock::decode(ConstPage(page.bytes))) return *found;
  }
  return std::nullopt;
}

uint64_t sequence_of(int fd, const Uuid& uuid, uint64_t offset) {
  Page4k page;
  if (!read_spool(fd, offset, page.bytes)) return 0;
  const auto header = SegmentHeader::decode(uuid, ConstPage(page.bytes));
  return header ? header->sequence : 0;
}

uint64_t footer_of(int fd, const SegmentPlace& place) {
  Page4k page;
  if (!read_spool(fd, place.offset + place.segment_bytes - kPageBytes, page.bytes)) return 0;
  const auto trailer = FooterTrailer::decode(place.uuid, place.segment_bytes, ConstPage(page.bytes));
  if (!trailer || trailer->sequence != place.sequence) return 0;
  return FooterTrailer::entries_bytes(trailer->count) + kPageBytes;
}

// Whether the file has bytes of its records, or has given them back.
bool has_records(int fd, const SegmentPlace& place) {
  const off_t data = ::lseek(fd, static_cast<off_t>(place.offset + kPageBytes), SEEK_DATA);
  if (data < 0) return errno != ENXIO;  // not known: then the checks find out
  return static_cast<uint64_t>(data) < place.offset + place.segment_bytes - footer_of(fd, place);
}

// How far its records go, in bytes from the segment's begin.
uint64_t used_of(int fd, const SegmentPlace& place, bool sealed) {
  const AlignedMemory buffer(256 << 10);
  const ReadAt read = [fd](uint64_t offset, std::span<std::byte> to) { return read_spool(fd, offset, to); };
  uint64_t end = kPageBytes;
  const VisitRecord visit = [&](const RecordHeader& header, uint32_t unit) {
    if (fits(place.segment_bytes, unit, header.size))
      end = std::max(end, unit * kUnitBytes + record_bytes(header.size));
  };
  if (!sealed || !read_footer(place, buffer, read, visit))
    (void)walk_records(place, kFirstUnit, buffer, read, visit);
  return std::min(round_up(end, kPageBytes), place.segment_bytes - kPageBytes);
}

int64_t fetch(const SpoolOptions& options, const std::string& name, uint64_t offset, uint64_t size,
              std::vector<std::byte>& bytes) {
  ObjectRequest request;
  request.kind = ObjectRequest::Kind::kRead;
  request.name = name;
  request.offset = offset;
  request.size = size;
  ObjectAnswer answer = options.requests->call(std::move(request), 4 * options.timeout_ms);
  bytes = std::move(answer.bytes);
  if (answer.result < 0) return answer.result;
  return bytes.size() == size ? 0 : -ENOENT;
}

// One segment as the store has it: its header and its footer, and its records where there is no footer.
int64_t restore(int fd, const SpoolOptions& options, const SegmentObject& object, uint64_t offset,
                uint64_t segment_bytes) {
  if (object.size() > segment_bytes) return 0;
  const std::string name = object.name(options.log);
  std::vector<std::byte> head, footer;
  const uint64_t head_bytes = object.footer > 0 ? kPageBytes : object.used;
  if (const int64_t got = fetch(options, name, 0, head_bytes, head); got < 0) return got;
  if (object.footer > 0) {
    if (const int64_t got = fetch(options, name, object.used, object.footer, footer); got < 0) return got;
  }
  punch_spool(fd, offset, segment_bytes);
  const bool written =
      write_spool(fd, offset + segment_bytes - footer.size(), footer) && write_spool(fd, offset, head);
  return written ? 0 : -EIO;
}

}  // namespace

Status prepare_spool(const std::string& path, const SpoolOptions& options) {
  const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (fd < 0) return {Code::kConfigInvalid, "the spool " + path + ": " + std::strerror(errno)};
  const Spool spool(fd);
  if (!lock_file(fd)) return {Code::kConfigInvalid, path + ": another process uses it"};
  std::map<std::string, ObjectListing> logs;
  if (const int error = list_logs(*options.requests, options.log + "/", 10 * options.timeout_ms, logs);
      error != 0)
    return silent(error);
  const ObjectListing& listing = logs[options.log];
  std::optional<Superblock> layout = superblock_of(fd);
  if (listing.superblock != 0) {
    std::vector<std::byte> page;
    if (const int64_t got = fetch(options, superblock_name(options.log), 0, kPageBytes, page); got < 0)
      return silent(static_cast<int>(-got));
    const auto there = Superblock::decode(ConstPage(page.data(), kPageBytes));
    if (!there || there->node_id != options.node_id) {
      return {Code::kConfigInvalid,
              "the object store does not have the log of this node as " + options.log +
                  ", but something else: " +
                  (there ? "that of the node " + there->node_id : there.status().message) +
                  "; delete it, or name another place"};
    }
    if (!layout || layout->uuid != there->uuid) {
      // Of another time: the node has a log that was begun elsewhere.
      layout = *there;
      const uint64_t bytes = kDataOffset + layout->segments * layout->segment_bytes;
      const bool written = ::ftruncate(fd, 0) == 0 && ::ftruncate(fd, static_cast<off_t>(bytes)) == 0 &&
                           write_spool(fd, 0, page) && write_spool(fd, kPageBytes, page);
      if (!written) return {Code::kInternal, path + " cannot be written"};
    }
  }
  if (!layout) return Status::ok();
  std::vector<std::pair<SegmentObject, uint64_t>> missing;  // with their offsets
  std::vector<uint64_t> sequences(layout->segments);
  for (uint32_t number = 0; number < layout->segments; ++number)
    sequences[number] = sequence_of(fd, layout->uuid, kDataOffset + number * layout->segment_bytes);
  const uint64_t latest = *std::max_element(sequences.begin(), sequences.end());
  for (uint32_t number = 0; number < layout->segments; ++number) {
    const uint64_t offset = kDataOffset + number * layout->segment_bytes;
    const uint64_t sequence = sequences[number];
    const auto found = listing.segments.find(number);
    // What the file knows and has wiped does not come back from the store.
    const bool is_there = found != listing.segments.end() &&
                          (found->second.sequence == sequence || found->second.sequence > latest);
    if (is_there && (found->second.sequence > sequence ||
                     !has_records(fd, {layout->uuid, layout->segment_bytes, offset, sequence}))) {
      missing.emplace_back(found->second, offset);
    } else if (!is_there && sequence != 0 &&
               !has_records(fd, {layout->uuid, layout->segment_bytes, offset, sequence})) {
      punch_spool(fd, offset, layout->segment_bytes);  // it was in the store, and went there
    }
  }
  std::atomic<size_t> next{0};
  std::atomic<int64_t> worst{0};
  std::vector<std::thread> fetchers;
  for (size_t i = 0; i < std::min(kFetchers, missing.size()); ++i) {
    fetchers.emplace_back([&] {
      for (size_t at = next++; at < missing.size() && worst == 0; at = next++) {
        const int64_t got =
            restore(fd, options, missing[at].first, missing[at].second, layout->segment_bytes);
        if (got < 0 && got != -ENOENT) worst = got;
      }
    });
  }
  for (std::thread& fetcher : fetchers) fetcher.join();
  return worst == 0 ? Status::ok() : silent(static_cast<int>(-worst));
}

Status SpoolQueue::laid_out(const Superblock& layout) {
  std::map<std::string, ObjectListing> logs;
  if (const int error = list_logs(*options_.requests, options_.log + "/", 10 * options_.timeout_ms, logs);
      error != 0)
    return silent(error);
  const ObjectListing& listing = logs[options_.log];
  const std::lock_guard lock(mutex_);
  uuid_ = layout.uuid;
  segment_bytes_ = layout.segment_bytes;
  segments_.resize(layout.segments);
  superblock_changed_ = true;
  for (const SegmentObject& object : listing.former) former_.push_back({object, 0});
  for (const auto& [number, object] : listing.segments) {
    if (number >= layout.segments) former_.push_back({object, 0});
  }
  for (uint32_t number = 0; number < layout.segments; ++number) adopt(number, listing);
  uploader_ = std::thread([this] { upload_for_ever(); });
  return Status::ok();
}

// The lock is held.
void SpoolQueue::adopt(uint32_t number, const ObjectListing& listing) {
  Segment& segment = segments_[number];
  const auto found = listing.segments.find(number);
  const uint64_t sequence = sequence_of(fd_, uuid_, offset_of(number));
  segment.sequence = sequence;
  if (found != listing.segments.end()) {
    if (sequence != found->second.sequence) {
      former_.push_back({found->second, 0});
    } else {
      segment.object = found->second;
    }
  }
  if (sequence == 0) return;
  const SegmentPlace place{uuid_, segment_bytes_, offset_of(number), sequence};
  segment.footer = footer_of(fd_, place);
  segment.sealed = segment.footer > 0;
  const bool is_whole = segment.object && segment.object->footer > 0;
  segment.used = is_whole ? segment.object->used : used_of(fd_, place, segment.sealed);
  segment.sent = is_whole && segment.sealed && segment.object->footer == segment.footer;
  punches_ = punches_ || segment.sent;
  const bool is_more = !segment.object || segment.sealed || segment.used > segment.object->used;
  if (!segment.sent && is_more) segment.changed_ms = 1;
}

}  // namespace mooncache::store::disk
