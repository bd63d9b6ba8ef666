#include "store/disk/object_log.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <utility>

namespace mooncache::store::disk {

namespace {

constexpr std::string_view kSuperblock = "superblock";
constexpr uint32_t kListTimes = 10;  // a listing may take so many times as long as a read

uint64_t mixed(uint64_t hash, uint64_t value) {
  hash ^= value + 0x9e3779b97f4a7c15ull + (hash << 6) + (hash >> 2);
  return hash * 0xff51afd7ed558ccdull;
}

class ObjectFile final : public SharedFile {
 public:
  ObjectFile(std::shared_ptr<ObjectRequests> requests, std::string log, ObjectListing listing,
             std::vector<std::byte> superblock, uint32_t timeout_ms)
      : requests_(std::move(requests)),
        log_(std::move(log)),
        listing_(std::move(listing)),
        superblock_(std::move(superblock)),
        timeout_ms_(timeout_ms) {
    const auto layout = Superblock::decode(ConstPage(superblock_.data(), kPageBytes));
    if (layout) segment_bytes_ = layout->segment_bytes;
    const uint64_t segments = layout ? layout->segments : 0;
    version_ = {listing_.superblock, kDataOffset + segments * segment_bytes_, listing_.version};
  }
  Version version() const override { return version_; }
  std::optional<uint64_t> sequence(uint32_t number) const override {
    const auto found = listing_.segments.find(number);
    return found == listing_.segments.end() ? 0 : found->second.sequence;
  }
  int64_t read(uint64_t offset, Slice to) override {
    std::memset(to.data, 0, to.size);
    if (offset < kDataOffset) {
      const uint64_t begin = offset % kPageBytes;
      if (offset < 2 * kPageBytes)  // two copies, of which this is one
        std::memcpy(to.data, superblock_.data() + begin, std::min<uint64_t>(to.size, kPageBytes - begin));
      return static_cast<int64_t>(to.size);
    }
    if (segment_bytes_ == 0) return -EIO;
    const auto number = static_cast<uint32_t>((offset - kDataOffset) / segment_bytes_);
    const auto found = listing_.segments.find(number);
    if (found == listing_.segments.end()) return static_cast<int64_t>(to.size);
    const SegmentObject& object = found->second;
    const uint64_t begin = (offset - kDataOffset) % segment_bytes_;
    const uint64_t end = std::min(begin + to.size, segment_bytes_);
    const uint64_t footer_begin = segment_bytes_ - object.footer;
    int64_t worst = piece(object, begin, std::min(end, object.used), 0, begin, to);
    if (worst >= 0) {
      worst = piece(object, std::max(begin, footer_begin), end, footer_begin - object.used, begin, to);
    }
    return worst < 0 ? worst : worst > 0 ? 0 : static_cast<int64_t>(to.size);
  }

 private:
  // Bytes `from` to `end` of the segment, which lie `less` earlier in the object. 0; 1: the object is gone or
  // too short; -errno.
  int64_t piece(const SegmentObject& object, uint64_t from, uint64_t end, uint64_t less, uint64_t begin,
                Slice to) {
    if (from >= end) return 0;
    ObjectRequest request;
    request.kind = ObjectRequest::Kind::kRead;
    request.name = object.name(log_);
    request.offset = from - less;
    request.size = end - from;
    const ObjectAnswer answer = requests_->call(std::move(request), timeout_ms_);
    if (answer.result == -ENOENT) return 1;
    if (answer.result < 0) return answer.result;
    if (answer.bytes.size() != end - from) return 1;
    std::memcpy(to.data + (from - begin), answer.bytes.data(), answer.bytes.size());
    return 0;
  }

  const std::shared_ptr<ObjectRequests> requests_;
  const std::string log_;
  const ObjectListing listing_;
  const std::vector<std::byte> superblock_;
  const uint32_t timeout_ms_;
  uint64_t segment_bytes_ = 0;
  Version version_;
};

class ObjectFolder final : public SharedFolder {
 public:
  ObjectFolder(std::shared_ptr<ObjectRequests> requests, uint32_t timeout_ms)
      : requests_(std::move(requests)), timeout_ms_(timeout_ms) {}

  int list(std::vector<std::string>& names, size_t most) override {
    std::map<std::string, ObjectListing> logs;
    const int error = list_logs(*requests_, {}, kListTimes * timeout_ms_, logs);
    if (error != 0) return error;
    for (const auto& [name, listing] : logs) {
      if (names.size() < most && listing.superblock != 0) names.push_back(name);
    }
    const std::lock_guard lock(mutex_);
    std::erase_if(superblocks_, [&](const auto& known) { return !logs.contains(known.first); });
    logs_ = std::move(logs);
    return 0;
  }

  std::shared_ptr<SharedFile> open(const std::string& name, int& error) override {
    ObjectListing listing;
    std::pair<uint64_t, std::vector<std::byte>> superblock;
    {
      const std::lock_guard lock(mutex_);
      const auto found = logs_.find(name);
      error = ENOENT;
      if (found == logs_.end()) return nullptr;
      listing = found->second;
      superblock = superblocks_[name];
    }
    if (superblock.first != listing.superblock) {
      ObjectRequest request;
      request.kind = ObjectRequest::Kind::kRead;
      request.name = superblock_name(name);
      request.size = kPageBytes;
      ObjectAnswer answer = requests_->call(std::move(request), timeout_ms_);
      error = answer.result < 0 ? static_cast<int>(-answer.result) : EINVAL;
      if (answer.result < 0 || answer.bytes.size() != kPageBytes) return nullptr;
      superblock = {listing.superblock, std::move(answer.bytes)};
      const std::lock_guard lock(mutex_);
      superblocks_[name] = superblock;
    }
    error = 0;
    return std::make_shared<ObjectFile>(requests_, name, std::move(listing), std::move(superblock.second),
                                        timeout_ms_);
  }

 private:
  const std::shared_ptr<ObjectRequests> requests_;
  const uint32_t timeout_ms_;
  std::mutex mutex_;
  std::map<std::string, ObjectListing> logs_;
  std::map<std::string, std::pair<uint64_t, std::vector<std::byte>>> superblocks_;  // by version
};

}  // namespace

std::string superblock_name(std::string_view log) {
  return std::string(log) + "/" + std::string(kSuperblock);
}

std::string SegmentObject::name(std::string_view log) const {
  std::array<char, 80> text{};
  (void)std::snprintf(text.data(), text.size(), "/%04x-%016llx-%08llx-%08llx", number,
                      static_cast<unsigned long long>(sequence), static_cast<unsigned long long>(used),
                      static_cast<unsigned long long>(footer));
  return std::string(log) + text.data();
}

std::optional<SegmentObject> SegmentObject::parse(std::string_view name) {
  std::array<uint64_t, 4> numbers{};
  for (size_t i = 0; i < numbers.size(); ++i) {
    const size_t end = i + 1 < numbers.size() ? name.find('-') : name.size();
    if (end == std::string_view::npos || end == 0) return std::nullopt;
    const auto [stop, error] = std::from_chars(name.data(), name.data() + end, numbers[i], 16);
    if (error != std::errc() || stop != name.data() + end) return std::nullopt;
    name.remove_prefix(std::min(name.size(), end + 1));
  }
  const auto [number, sequence, used, footer] = numbers;
  const bool is_end = used == 0 && footer == 0;
  const bool sane = number < kMaxSegments && sequence > 0 && (is_end || used >= kPageBytes) &&
                    used % kPageBytes == 0 && footer % kPageBytes == 0 && used <= kMaxSegmentBytes &&
                    footer <= kMaxSegmentBytes && used + footer <= kMaxSegmentBytes;
  if (!sane) return std::nullopt;
  return SegmentObject{static_cast<uint32_t>(number), sequence, used, footer};
}

int list_logs(ObjectRequests& requests, const std::string& prefix, uint32_t timeout_ms,
              std::map<std::string, ObjectListing>& logs) {
  ObjectRequest request;
  request.kind = ObjectRequest::Kind::kList;
  request.name = prefix;
  const ObjectAnswer answer = requests.call(std::move(request), timeout_ms);
  if (answer.result < 0) return static_cast<int>(-answer.result);
  std::map<std::string, std::vector<SegmentObject>> ends;
  Reader reader(answer.bytes);
  while (reader.remaining() > 0) {
    const std::string path = reader.str16();
    const uint64_t size = reader.u64(), version = reader.u64();
    if (!reader.ok()) return EBADMSG;
    const size_t slash = path.find('/');
    if (slash == std::string::npos) continue;
    const std::string log = path.substr(0, slash), name = path.substr(slash + 1);
    if (!std::string_view(log).ends_with(kSharedSuffix) || log.front() == '.') continue;
    ObjectListing& listing = logs[log];
    if (name == kSuperblock && size == kPageBytes) {
      listing.superblock = std::max<uint64_t>(version, 1);
    } else if (const auto object = SegmentObject::parse(name); object && object->size() == size) {
      if (object->is_end()) ends[log].push_back(*object);
      auto [known, fresh] = object->is_end() ? std::pair(listing.segments.end(), true)
                                             : listing.segments.emplace(object->number, *object);
      if (!fresh) {
        const bool later = known->second < *object;
        listing.former.push_back(later ? known->second : *object);
        if (later) known->second = *object;
      }
    } else {
      continue;
    }
    // In any order.
    listing.version ^= mixed(mixed(std::hash<std::string>{}(name), size), version);
  }
  for (const auto& [log, given_up] : ends) {
    ObjectListing& listing = logs[log];
    for (const SegmentObject& end : given_up) {
      const auto found = listing.segments.find(end.number);
      if (found == listing.segments.end() || found->second.sequence > end.sequence) continue;
      listing.former.push_back(found->second);
      listing.segments.erase(found);
    }
    listing.former.insert(listing.former.end(), given_up.begin(), given_up.end());
  }
  return 0;
}

std::shared_ptr<SharedFolder> open_object_folder(std::shared_ptr<ObjectRequests> requests,
                                                 uint32_t timeout_ms) {
  return std::make_shared<ObjectFolder>(std::move(requests), timeout_ms);
}

}  // namespace mooncache::store::disk
