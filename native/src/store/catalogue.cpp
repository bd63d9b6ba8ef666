#include "store/catalogue.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <span>
#include <utility>

#include "mooncache/crc32c.h"
#include "mooncache/store.h"

namespace mooncache::store {

// Little endian, as the processors are that this runs on; memory files never leave their host.
struct Catalogue::Record {
  uint64_t seal;
  KeptRecord content;
  uint64_t use;  // writer << 48 | tick << 1 | queue
};

namespace {

constexpr uint64_t kHeaderBytes = 4096;
constexpr uint64_t kRecordBytes = 96;
constexpr char kMagic[8] = {'m', 'o', 'o', 'n', 'k', 'e', 'p', 't'};
constexpr uint64_t kSessionsMax = 1ull << 40;
constexpr uint64_t kSlotsMax = 1ull << 32;

struct Header {
  char magic[8];
  uint32_t version;
  uint32_t record_bytes;
  uint32_t quantum_bytes;
  uint32_t shards;
  uint64_t slots;
  uint64_t capacity_bytes;
  uint64_t arenas;
  uint32_t node_crc;    // of the node's name
  uint32_t arenas_crc;  // of their sizes
  Catalogue::Seeds seeds;
  uint32_t reserved;
  uint32_t crc;  // of all above
  // Behind the checksum, because each process changes it, by one store.
  uint64_t session;
};
static_assert(sizeof(Header) == 104 && offsetof(Header, crc) == 92);
static_assert(sizeof(Header) + kMaxWriters * sizeof(uint64_t) <= kHeaderBytes);
constexpr uint32_t kWriterShift = 48;
constexpr uint64_t kMaxTick = (1ull << (kWriterShift - 1)) - 1;

uint64_t use_of(uint64_t tick, uint8_t queue, uint16_t writer) {
  return uint64_t{writer} << kWriterShift | (tick & kMaxTick) << 1 | (queue & 1u);
}

template <typename T>
uint32_t crc_of(std::span<const T> values) {
  return crc32c(std::as_bytes(values));
}

uint32_t header_crc(const Header& header) {
  return crc_of(std::as_bytes(std::span(&header, 1)).first(offsetof(Header, crc)));
}

Header header_of(const CatalogueShape& shape, const Catalogue::Seeds& seeds) {
  Header header{};
  std::memcpy(header.magic, kMagic, sizeof kMagic);
  header.version = kCatalogueVersion;
  header.record_bytes = kRecordBytes;
  header.quantum_bytes = shape.quantum_bytes;
  header.shards = shape.shards;
  header.slots = shape.slots;
  header.capacity_bytes = shape.capacity_bytes;
  header.arenas = shape.arena_bytes.size();
  header.node_crc = crc_of(std::span<const char>(shape.node_id));
  header.arenas_crc = crc_of(std::span<const uint64_t>(shape.arena_bytes));
  header.seeds = seeds;
  header.crc = header_crc(header);
  return header;
}

Status other(const std::string& what) {
  return {Code::kConfigInvalid, what};
}

Status check_header(const Header& found, const CatalogueShape& shape) {
  if (std::memcmp(found.magic, kMagic, sizeof kMagic) != 0) return other("the kept catalogue is damaged");
  if (found.version != kCatalogueVersion)
    return other("the kept memory has layout version " + std::to_string(found.version) + ", this is " +
                 std::to_string(kCatalogueVersion));
  if (found.crc != header_crc(found)) return other("the kept catalogue is damaged");
  const Header wanted = header_of(shape, found.seeds);
  if (found.node_crc != wanted.node_crc) return other("the kept memory is another node's");
  if (std::memcmp(&found, &wanted, offsetof(Header, session)) != 0)
    return other("the kept memory has another size or another geometry");
  if (found.session == 0 || found.session >= kSessionsMax) return other("the kept catalogue is damaged");
  for (const uint64_t seed : found.seeds)
    if (seed % 2 == 0) return other("the kept catalogue is damaged");
  return Status::ok();
}

uint64_t file_bytes(const CatalogueShape& shape) {
  return kHeaderBytes + shape.slots * kRecordBytes;
}

std::atomic_ref<uint64_t> word(uint64_t& value) {
  return std::atomic_ref<uint64_t>(value);
}

// What is not known yet while the block is being written is not part of that seal.
uint64_t seal_of(uint32_t slot, Kept kind, const KeptRecord& record) {
  struct {
    uint64_t words[4];
    uint64_t tenant, size, committed_ms, generation;
    uint32_t offset, crc, arena, slot, kind, reserved;
  } sealed{};
  std::memcpy(sealed.words, &record.key, sizeof sealed.words);
  sealed.tenant = record.tenant;
  sealed.size = record.size;
  if (kind == Kept::kCommitted) {
    sealed.committed_ms = record.committed_ms;
    sealed.generation = record.generation;
    sealed.crc = record.crc;
  }
  sealed.offset = record.offset;
  sealed.arena = record.arena;
  sealed.slot = slot;
  sealed.kind = static_cast<uint32_t>(kind);
  const uint64_t crc = crc32c(std::as_bytes(std::span(&sealed, 1)));
  return crc << 32 | static_cast<uint64_t>(kind);
}

}  // namespace

static_assert(sizeof(KeptRecord) == 80);

Catalogue::Record& Catalogue::record_of(uint32_t slot) const {
  static_assert(sizeof(Record) == kRecordBytes);
  return *reinterpret_cast<Record*>(file_.data() + kHeaderBytes + uint64_t{slot} * kRecordBytes);
}

Result<Catalogue> Catalogue::create(const CatalogueShape& shape, const Seeds& seeds) {
  if (shape.slots == 0 || shape.slots > kSlotsMax) return other("too many slots for a catalogue");
  auto file = Memfd::create("mooncache-catalogue", file_bytes(shape), {});
  if (!file) return file.status();
  if (Status status = file->keep(0); !status) return status;
  Catalogue catalogue;
  catalogue.file_ = std::move(*file);
  catalogue.seeds_ = seeds;
  catalogue.slots_ = shape.slots;
  catalogue.session_ = 1;
  Header header = header_of(shape, seeds);
  header.session = 1;
  std::memcpy(catalogue.file_.data(), &header, sizeof header);
  return catalogue;
}

Result<Catalogue> Catalogue::adopt(int fd, const CatalogueShape& shape) {
  if (shape.slots == 0 || shape.slots > kSlotsMax) return other("too many slots for a catalogue");
  auto file = Memfd::adopt(fd, file_bytes(shape), {});
  if (!file) return file.status();
  if (Status status = file->keep(0); !status) return status;
  Header header;
  std::memcpy(&header, file->data(), sizeof header);
  if (Status status = check_header(header, shape); !status) return status;
  Catalogue catalogue;
  catalogue.file_ = std::move(*file);
  catalogue.seeds_ = header.seeds;
  catalogue.slots_ = shape.slots;
  catalogue.session_ = header.session + 1;
  auto* const in_force = reinterpret_cast<Header*>(catalogue.file_.data());
  word(in_force->session).store(catalogue.session_, std::memory_order_release);
  return catalogue;
}

void Catalogue::prefetch(uint32_t slot) const {
  const auto* const line = reinterpret_cast<const std::byte*>(&record_of(slot));
  __builtin_prefetch(line, 1);
  __builtin_prefetch(line + kRecordBytes - 1, 1);
}

const KeptRecord& Catalogue::content(uint32_t slot) const {
  return record_of(slot).content;
}

void Catalogue::reserve(uint32_t slot, const KeptRecord& record, uint16_t writer) {
  Record& kept = record_of(slot);
  word(kept.seal).store(0, std::memory_order_relaxed);
  std::atomic_signal_fence(std::memory_order_seq_cst);
  kept.content = record;
  word(kept.use).store(use_of(0, 0, writer), std::memory_order_relaxed);
  word(kept.seal).store(seal_of(slot, Kept::kReserved, record), std::memory_order_release);
}

void Catalogue::commit(uint32_t slot, uint32_t crc, uint64_t generation, uint64_t committed_ms,
                       uint32_t written_s) {
  Record& kept = record_of(slot);
  kept.content.crc = crc;
  kept.content.generation = generation;
  kept.content.committed_ms = committed_ms;
  kept.content.written_s = written_s;
  word(kept.seal).store(seal_of(slot, Kept::kCommitted, kept.content), std::memory_order_release);
}

void Catalogue::clear(uint32_t slot) {
  word(record_of(slot).seal).store(0, std::memory_order_release);
}

void Catalogue::purge(uint32_t slot) {
  Record& kept = record_of(slot);
  word(kept.seal).store(seal_of(slot, Kept::kPurged, kept.content), std::memory_order_release);
}

void Catalogue::note_use(uint32_t slot, uint64_t tick, uint8_t queue, uint16_t writer) {
  word(record_of(slot).use).store(use_of(tick, queue, writer), std::memory_order_relaxed);
}

// Between the stores its time is unknown: a recall of the former writer, or of this one, takes it whatever
// the time.
void Catalogue::set_origin(uint32_t slot, uint64_t tick, uint8_t queue, uint16_t writer, uint32_t written_s) {
  Record& kept = record_of(slot);
  const std::atomic_ref<uint32_t> written(kept.content.written_s);
  written.store(0, std::memory_order_relaxed);
  word(kept.use).store(use_of(tick, queue, writer), std::memory_order_release);
  written.store(written_s, std::memory_order_release);
}

void Catalogue::set_writer(uint16_t number, uint64_t id) {
  auto* const ids = reinterpret_cast<uint64_t*>(file_.data() + sizeof(Header));
  word(ids[number - 1]).store(id, std::memory_order_release);
}

uint64_t Catalogue::writer(uint16_t number) const {
  auto* const ids = reinterpret_cast<uint64_t*>(file_.data() + sizeof(Header));
  return word(ids[number - 1]).load(std::memory_order_relaxed);
}

Catalogue::Found Catalogue::read(uint32_t slot) const {
  Record& kept = record_of(slot);
  Found found;
  const uint64_t seal = word(kept.seal).load(std::memory_order_acquire);
  if (seal == 0) return found;
  found.record = kept.content;
  found.kind = Kept::kDamaged;
  for (const Kept said : {Kept::kCommitted, Kept::kReserved, Kept::kPurged}) {
    if (static_cast<uint32_t>(seal) == static_cast<uint32_t>(said) &&
        seal == seal_of(slot, said, found.record))
      found.kind = said;
  }
  const uint64_t use = word(kept.use).load(std::memory_order_relaxed);
  found.tick = use >> 1 & kMaxTick;
  found.queue = use & 1u;
  found.writer = static_cast<uint16_t>(use >> kWriterShift);
  return found;
}

Catalogue::Range Catalogue::next_used(uint64_t from) const {
  const uint64_t size = kHeaderBytes + slots_ * kRecordBytes;
  const auto start = static_cast<off_t>(kHeaderBytes + from * kRecordBytes);
  if (from >= slots_) return {slots_, slots_};
  const off_t data = ::lseek(file_.fd_rw(), start, SEEK_DATA);
  if (data < 0 && errno == ENXIO) return {slots_, slots_};
  if (data < 0) return {from, slots_};  // the kernel does not tell
  const off_t hole = ::lseek(file_.fd_rw(), data, SEEK_HOLE);
  const uint64_t end = hole < 0 ? size : std::min(static_cast<uint64_t>(hole), size);
  const uint64_t first = std::max(from, (static_cast<uint64_t>(data) - kHeaderBytes) / kRecordBytes);
  return {first, std::min(slots_, (end - kHeaderBytes + kRecordBytes - 1) / kRecordBytes)};
}

const char* wrong_with(const KeptRecord& record, const CatalogueShape& shape, uint64_t max_block_bytes) {
  if (record.size == 0 || record.size > max_block_bytes) return "size";
  if (record.arena >= shape.arena_bytes.size()) return "arena";
  const uint64_t quanta = (record.size - 1) / shape.quantum_bytes + 1;
  const uint64_t capacity = shape.arena_bytes[record.arena] / shape.quantum_bytes;
  if (quanta > capacity || record.offset > capacity - quanta) return "extent";
  return "";
}

}  // namespace mooncache::store
