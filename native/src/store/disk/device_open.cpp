// The start of a device: its file, its superblock, and the index from footers, or from the headers of records
// where a segment has no footer. All of it on the device's thread, one read after the other.
#include <sys/random.h>

#include <algorithm>
#include <cerrno>
#include <chrono>

#include "store/disk/device.h"
#include "store/disk/segment_reader.h"

namespace mooncache::store::disk {

namespace {

constexpr uint64_t kMinCapacityBytes = 4 << 20;
constexpr uint32_t kMinSegments = 4;
constexpr uint64_t kReadBytes = 256 << 10;
constexpr uint32_t kReads = 64, kChunks = 24;
constexpr uint64_t kPlainTimeoutMs = 10'000;

uint64_t random_seed() {
  uint64_t seed = 0;
  (void)!::getrandom(&seed, sizeof seed, 0);
  return seed;
}

}  // namespace

Device::Device(DeviceOptions options, Memory& memory)
    : options_(std::move(options)),
      memory_(memory),
      index_(random_seed()),
      budget_(options_.write_bytes_per_s, 0),
      random_(random_seed()) {}

Result<std::unique_ptr<Device>> Device::open(DeviceOptions options, Memory& memory) {
  if (options.capacity_bytes < kMinCapacityBytes)
    return {Code::kConfigInvalid, "the SSD tier needs at least 4 MiB"};
  if (options.node_id.empty() || options.node_id.size() > kMaxNodeIdBytes)
    return {Code::kConfigInvalid, "the node's name does not fit into a superblock"};
  std::unique_ptr<Device> device(new Device(std::move(options), memory));
  device->thread_ = std::thread([raw = device.get()] { raw->run(); });
  std::unique_lock lock(device->ready_mutex_);
  device->ready_changed_.wait(lock, [&] { return device->ready_.has_value(); });
  const Status ready = *device->ready_;
  lock.unlock();
  if (!ready) return ready;
  return device;
}

Status Device::start() {
  if (Status opened = open_file(); !opened) return opened;
  if (Status sound = open_superblock(); !sound) return sound;
  if (Status ready = queue_->laid_out(layout_); !ready) return ready;
  chunk_bytes_ = std::min<uint64_t>(1 << 20, layout_.segment_bytes / 4);
  return recover();
}

Status Device::open_file() {
  auto file = File::open(options_.path);
  if (!file) return file.status();
  file_ = std::move(*file);
  read_memory_ = AlignedMemory(kReads * kPieceBytes);
  page_memory_ = AlignedMemory(2 * kReadBytes);
  chunk_memory_ = AlignedMemory(kChunks << 20);
  const iovec buffers[] = {{read_memory_.data(), read_memory_.size()},
                           {chunk_memory_.data(), chunk_memory_.size()}};
  queue_ = options_.open_queue ? options_.open_queue(file_.fd(), buffers)
                               : open_io_queue(file_.fd(), buffers, {.allow_uring = options_.allow_uring});
  for (uint32_t number = 0; number < kReads; ++number) free_reads_.push_back(number);
  for (uint32_t number = 0; number < kChunks; ++number) free_chunks_.push_back(number);
  return Status::ok();
}

// Moves bytes and waits for it; -ETIMEDOUT when the device does not answer.
int64_t Device::plain(const Io& io) {
  Op op;
  op.kind = Op::Kind::kPlain;
  const auto begun = std::chrono::steady_clock::now();
  if (off_) return -ETIMEDOUT;
  const uint32_t slot = submit(std::move(op), io);
  if (slot == kNone) return -EAGAIN;
  while (ops_[slot].kind == Op::Kind::kPlain) {
    ends_.clear();
    queue_->wait(ends_, 100);
    for (const IoEnd& end : ends_) ended(end);
    if (std::chrono::steady_clock::now() - begun > std::chrono::milliseconds(kPlainTimeoutMs)) {
      off_ = true;
      return -ETIMEDOUT;
    }
  }
  return ops_[slot].result;
}

Status Device::open_superblock() {
  const std::string& path = file_.path();
  std::optional<Superblock> found;
  Status worst{Code::kNotFound, {}};
  bool empty = false, newer = false, unfinished = false;
  for (uint64_t copy = 0; copy < 2 && file_.size_bytes() >= 2 * kPageBytes; ++copy) {
    const Slice page{page_memory_.data(), kPageBytes};
    if (plain({Io::Kind::kRead, copy * kPageBytes, page, -1, 0}) != static_cast<int64_t>(kPageBytes))
      return {Code::kInternal, path + " cannot be read"};
    const auto decoded = Superblock::decode(ConstPage(page.data, kPageBytes));
    if (decoded && !found) found = *decoded;
    empty = empty || decoded.code() == Code::kNotFound;
    // Ours, and the second copy was never written: the start that made the file did not end, and it holds
    // nothing.
    unfinished = copy == 1 && decoded.code() == Code::kNotFound && worst.code == Code::kChecksumMismatch;
    if (newer || decoded || decoded.code() == Code::kNotFound) continue;
    worst = decoded.status();
    newer = worst.code == Code::kVersionSkew;
  }
  // One copy of a newer version is enough: that version has begun to write here.
  if (newer || (!found && worst.code != Code::kNotFound && !unfinished)) {
    return {Code::kConfigInvalid, "the SSD tier does not touch " + path + ", because " + worst.message +
                                      "; delete it, or name another place"};
  }
  if (found && found->node_id != options_.node_id) {
    return {Code::kConfigInvalid,
            path + " holds the blocks of the node " + found->node_id + "; delete it, or name another place"};
  }
  if (Status unused = found || unfinished ? Status::ok() : check_unused(); !unused) return unused;
  Superblock wanted;
  if (found) wanted = *found;
  if (!found && ::getrandom(wanted.uuid.data(), wanted.uuid.size(), 0) != 16)
    return {Code::kInternal, "getrandom"};
  wanted.node_id = options_.node_id;
  if (!found) {
    wanted.segment_bytes =
        options_.segment_bytes != 0 ? options_.segment_bytes : segment_bytes_for(options_.capacity_bytes);
  }
  const uint64_t least = kDataOffset + kMinSegments * wanted.segment_bytes;
  if (options_.capacity_bytes < least)
    return {Code::kConfigInvalid, path + " has larger segments than fit into its new capacity; delete it"};
  const auto reserved = file_.reserve(options_.capacity_bytes, least, options_.sparse);
  if (!reserved) return reserved.status();
  if (*reserved < options_.capacity_bytes) {
    memory_.log(30, "ssd_smaller",
                path + " has " + std::to_string(*reserved) + " bytes, because its file system has no more");
  }
  wanted.segments = static_cast<uint32_t>(
      std::min<uint64_t>((*reserved - kDataOffset) / wanted.segment_bytes, kMaxSegments));
  if (found && wanted.segments == found->segments && worst.code == Code::kNotFound && !empty) {
    layout_ = *found;
    return Status::ok();
  }
  return create_superblock(wanted, !found);
}

// File systems may leave their first pages empty; what they write lies in the first quarter of a MiB.
Status Device::check_unused() {
  const uint64_t bytes = std::min<uint64_t>(kReadBytes, file_.size_bytes() / kPageBytes * kPageBytes);
  if (bytes == 0) return Status::ok();
  const std::span<std::byte> begin(page_memory_.data(), bytes);
  if (plain({Io::Kind::kRead, 0, {begin.data(), bytes}, -1, 0}) != static_cast<int64_t>(bytes))
    return {Code::kInternal, file_.path() + " cannot be read"};
  if (std::all_of(begin.begin(), begin.end(), [](std::byte byte) { return byte == std::byte{0}; }))
    return Status::ok();
  return {Code::kConfigInvalid, "the SSD tier does not touch " + file_.path() +
                                    ", because it holds something else than blocks; delete it, or name "
                                    "another place"};
}

// One copy after the other, so that one is whole at every moment. The first one of all is written twice,
// before without its CRC, in its last sector: so the first sector always says whose file it is, however it
// was torn.
Status Device::create_superblock(const Superblock& wanted, bool is_first) {
  const Slice page{page_memory_.data(), kPageBytes};
  const auto write = [&](uint64_t copy) {
    return plain({Io::Kind::kWrite, copy * kPageBytes, page, -1, 0}) == static_cast<int64_t>(kPageBytes) &&
           plain({Io::Kind::kSync, 0, {}, -1, 0}) == 0;
  };
  wanted.encode(Page(page.data, kPageBytes));
  std::fill_n(page.data + kPageBytes - sizeof(uint32_t), sizeof(uint32_t), std::byte{0});
  bool written = !is_first || write(0);
  wanted.encode(Page(page.data, kPageBytes));
  written = written && write(0) && write(1);
  if (!written) return {Code::kInternal, file_.path() + " cannot be written"};
  layout_ = wanted;
  return Status::ok();
}

Status Device::recover() {
  segments_.resize(layout_.segments);
  std::vector<uint32_t> used;
  const Slice page{page_memory_.data(), kPageBytes};
  for (uint32_t number = 0; number < layout_.segments; ++number) {
    const int64_t got = plain({Io::Kind::kRead, segment_offset(number), page, -1, 0});
    const auto header = got == static_cast<int64_t>(kPageBytes)
                            ? SegmentHeader::decode(layout_.uuid, ConstPage(page.data, kPageBytes))
                            : Result<SegmentHeader>{Code::kInternal, "unreadable"};
    if (!header) {
      free_segments_.push_back(number);
      continue;
    }
    segments_[number].state = Segment::State::kClosed;
    segments_[number].sequence = header->sequence;
    used.push_back(number);
  }
  // In the order in which they were written: a later record of a key is the one that counts.
  std::sort(used.begin(), used.end(),
            [this](uint32_t a, uint32_t b) { return segments_[a].sequence < segments_[b].sequence; });
  for (const uint32_t number : used) {
    next_sequence_ = std::max(next_sequence_, segments_[number].sequence + 1);
    if (recover_segment(number)) {
      closed_.push_back(number);
    } else {
      segments_[number].state = Segment::State::kFree;
      free_segments_.push_back(number);
    }
  }
  if (off_) return {Code::kInternal, file_.path() + " does not answer"};
  count_.recovered = index_.count();
  return Status::ok();
}

void Device::adopt(const RecordHeader& header, Location at) {
  if (header.removal() || header.foreign() || has_ended(header.end())) {
    const uint32_t known = index_.find(header.tenant, header.key);
    if (known != kNone) index_.erase(known);
  } else if (fits(layout_.segment_bytes, at.unit, header.size)) {
    (void)index_.put(header.tenant, header.key, header.size, at, true, header.encrypted(), header.end(),
                     header.origin);
  }
}

// From its footer, or from the headers of its records. False: it was opened ahead, and nothing was written to
// it.
bool Device::recover_segment(uint32_t number) {
  const SegmentPlace place{layout_.uuid, layout_.segment_bytes, segment_offset(number),
                           segments_[number].sequence};
  bool is_whole = true;
  const ReadAt read = [&](uint64_t offset, std::span<std::byte> to) {
    const Io io{Io::Kind::kRead, offset, {to.data(), to.size()}, -1, 0};
    const bool is_read = plain(io) == static_cast<int64_t>(to.size());
    is_whole = is_whole && is_read;
    return is_read;
  };
  const VisitRecord visit = [&](const RecordHeader& header, uint32_t unit) { adopt(header, {number, unit}); };
  if (read_footer(place, page_memory_, read, visit)) return true;
  return walk_records(place, kFirstUnit, page_memory_, read, visit) > kFirstUnit || !is_whole;
}

}  // namespace mooncache::store::disk
