// Fuzzes what a store adopts from a former process: the catalogue and the generations of a store that has
// some blocks are changed as the input says, then a store adopts them. It starts, is sound, and stays sound
// when blocks are read, checked, removed and put.
//
// The input is a row of changes of 16 bytes: what, where, and what to put there.
//
//   fuzz_catalogue native/fuzz/fuzz_catalogue_corpus
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "mooncache/crc32c.h"
#include "mooncache/store.h"
#include "store/catalogue.h"

namespace {

using namespace mooncache;

constexpr uint64_t kCapacity = 64 * 1024;
constexpr uint32_t kShards = 4;
constexpr uint64_t kSlots = (kCapacity / 64 / kShards * 5 / 4 + 64) * kShards;
constexpr uint32_t kBlocks = 40;
constexpr size_t kChangesMax = 64;

void demand(bool holds) {
  if (!holds) std::abort();
}

Key key_of(uint64_t number) {
  Key key;
  std::memcpy(key.bytes.data(), &number, sizeof number);
  return key;
}

std::unique_ptr<Store> open_store(const std::vector<int>& fds) {
  StoreConfig config;
  config.capacity_bytes = kCapacity;
  config.quantum_bytes = config.expected_block_bytes = 64;
  config.shards = kShards;
  config.event_log_capacity = 1024;
  config.keep.enabled = true;
  config.keep.fds = fds;
  auto store = Store::open(config);
  demand(store.is_ok());
  return std::move(*store);
}

void demand_sound(const Store& store) {
  std::string why;
  demand(store.check(&why));
}

void put(Store& store, uint64_t number, uint64_t size) {
  const auto reservation = store.reserve(1, key_of(number), size, 1);
  if (!reservation) return;
  const Slice bytes = store.writable(reservation->id);
  std::memset(bytes.data, static_cast<int>(number), bytes.size);
  (void)store.commit(reservation->id, crc32c({bytes.data, bytes.size}), 1);
}

struct Change {
  uint8_t what = 0, arena = 0;
  uint16_t slot = 0;
  uint32_t offset = 0, size = 0, value = 0;
};
static_assert(sizeof(Change) == 16);

// A record with a seal that holds, whatever is in it.
void write_record(int fd, const Change& change) {
  const store::CatalogueShape shape{"node", 64, kShards, kSlots, kCapacity, {kCapacity}};
  auto catalogue = store::Catalogue::adopt(fd, shape);
  if (!catalogue) return;
  const auto slot = static_cast<uint32_t>(change.slot % kSlots);
  catalogue->reserve(
      slot, {key_of(change.value), change.value % 3, change.size, 0, 0, change.offset, 0, change.arena % 3u});
  if (change.what % 2 == 0) catalogue->commit(slot, change.value, change.value, ~uint64_t{0});
}

void write_byte(int fd, const Change& change) {
  const off_t size = ::lseek(fd, 0, SEEK_END);
  const auto byte = static_cast<uint8_t>(change.value);
  (void)!::pwrite(fd, &byte, 1, static_cast<off_t>(change.offset) % size);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::vector<int> fds;
  {
    const auto store = open_store({});
    for (uint64_t number = 0; number < kBlocks; ++number) put(*store, number, 1 + number * 50);
    for (const int fd : store->kept().fds) fds.push_back(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
  }
  for (size_t at = 0; at + sizeof(Change) <= size && at < kChangesMax * sizeof(Change);
       at += sizeof(Change)) {
    Change change;
    std::memcpy(&change, data + at, sizeof change);
    if (change.what % 4 < 2) write_record(fds[0], change);
    if (change.what % 4 == 2) write_byte(fds[0], change);
    if (change.what % 4 == 3) write_byte(fds[1], change);
  }
  const auto store = open_store(fds);
  demand_sound(*store);
  demand(store->kept().blocks <= kBlocks + kChangesMax);
  for (uint64_t number = 0; number < kBlocks; number += 3) {
    const auto pinned = store->acquire(1, key_of(number), 1);
    if (!pinned) continue;
    demand(store->readable(pinned->id).size == pinned->info.extent.size);
    store->release(pinned->id);
  }
  (void)store->tend_kept(~uint64_t{0} >> 1);
  demand_sound(*store);
  for (uint64_t number = 0; number < kBlocks; number += 2)
    (void)store->remove(1, key_of(number), RemoveReason::kRemoved, 1);
  for (uint64_t number = 100; number < 130; ++number) put(*store, number, 1000);
  demand_sound(*store);
  for (const int fd : fds) ::close(fd);
  return 0;
}
