// Who wrote what: the table of writers, their numbers in memory and their ids on disks, and the recall.
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <set>
#include <thread>

#include "store/disk/format.h"
#include "store/disk/index.h"
#include "store/store_fixture.h"

namespace mooncache::test {
namespace {

using store::disk::DiskIndex;
using store::disk::FooterEntry;
using store::disk::FooterTrailer;
using store::disk::kFooterEntryBytes;
using store::disk::kFooterWriters;
using store::disk::kPageBytes;
using store::disk::kRecordHeaderBytes;
using store::disk::RecordHeader;
using store::disk::Uuid;

constexpr uint64_t kSmall = 4 << 10;

BlockWriter named(uint64_t id) {
  return {id, "engine-" + std::to_string(id), "test 1", 99};
}

Code put_by(Store& store, WriterNumber writer, uint64_t number, uint64_t size = kSmall) {
  auto reservation = store.reserve(kTenant, key_of(number), size, clock_ms(), writer);
  if (!reservation) return reservation.code();
  return store.commit(reservation->id, fill(store.writable(reservation->id), number), clock_ms()).code;
}

Recalled recall_all(Store& store, const RecallRequest& request) {
  Recalled sum;
  do {
    const Recalled page = store.recall(request, sum.next_cursor, clock_ms());
    sum.next_cursor = page.next_cursor;
    sum.blocks += page.blocks;
    sum.bytes += page.bytes;
    sum.held_blocks += page.held_blocks;
    sum.disk_blocks += page.disk_blocks;
    sum.disk_bytes += page.disk_bytes;
    sum.failed_blocks += page.failed_blocks;
  } while (sum.next_cursor != 0);
  return sum;
}

WriterUse use_of(const Store& store, uint64_t id) {
  for (const WriterUse& use : store.writers()) {
    if (use.writer.id == id) return use;
  }
  return {};
}

bool is_sound(const Store& store) {
  std::string why;
  const bool sound = store.check(&why);
  EXPECT_TRUE(sound) << why;
  return sound;
}

TEST(Writers, NumbersAreBoundedAndTheirNamesAreTheFirst) {
  const auto store = open_store(small_config(kMiB));
  EXPECT_EQ(store->open_writer({}), 0) << "without an id";
  std::vector<WriterNumber> numbers;
  for (uint64_t id = 1; id <= kMaxWriters; ++id) numbers.push_back(store->open_writer(named(id)));
  EXPECT_EQ(std::set<WriterNumber>(numbers.begin(), numbers.end()).size(), kMaxWriters);
  EXPECT_EQ(store->open_writer(named(9999)), 0) << "all of them are connected";
  EXPECT_EQ(store->writers_refused(), 1u);
  EXPECT_EQ(store->open_writer({1, "a thief", "x", 0}), numbers[0]);
  EXPECT_EQ(use_of(*store, 1).writer.instance, "engine-1") << "the first word counts";

  ASSERT_EQ(put_by(*store, numbers[1], 2), Code::kOk);
  for (const WriterNumber number : numbers) store->close_writer(number);
  store->close_writer(numbers[0]);
  for (uint64_t id = 1001; id < 1001 + kMaxWriters - 1; ++id) {
    const WriterNumber number = store->open_writer(named(id));
    EXPECT_NE(number, 0) << id;
    EXPECT_NE(number, numbers[1]) << "it has a block";
  }
  EXPECT_EQ(store->open_writer(named(9999)), 0);
  EXPECT_EQ(use_of(*store, 2).blocks, 1u);
  EXPECT_EQ(use_of(*store, 1).writer.id, 0u) << "forgotten";
}

TEST(Writers, ARecallTakesOneWritersBlocksAlone) {
  const auto store = open_store(small_config(4 * kMiB));
  const WriterNumber good = store->open_writer(named(1)), bad = store->open_writer(named(2));
  for (uint64_t i = 0; i < 100; ++i) ASSERT_EQ(put_by(*store, i % 2 == 0 ? good : bad, i), Code::kOk);
  ASSERT_EQ(put_by(*store, 0, 100), Code::kOk) << "of nobody known";
  ASSERT_EQ(store->pin(kTenant, key_of(1), 60'000, clock_ms()), Code::kOk);
  const auto reader = store->acquire(kTenant, key_of(3), clock_ms());
  ASSERT_TRUE(reader);
  const auto writing = store->reserve(kTenant, key_of(200), kSmall, clock_ms(), bad);
  ASSERT_TRUE(writing);

  const Recalled counted = recall_all(*store, {.writer = 2, .dry_run = true});
  EXPECT_EQ(counted.blocks, 50u);
  EXPECT_EQ(use_of(*store, 2).blocks, 50u) << "nothing went";
  const Recalled done = recall_all(*store, {.writer = 2});
  EXPECT_EQ(done.blocks, 50u);
  EXPECT_EQ(done.bytes, 50 * kSmall);
  EXPECT_EQ(done.held_blocks, 2u) << "one is read, one is written";
  EXPECT_EQ(done.failed_blocks, 0u);
  EXPECT_EQ(store->commit(writing->id, 0, clock_ms()).code, Code::kReservationUnknown);
  EXPECT_TRUE(holds(store->readable(reader->id), 3)) << "who reads goes on";
  store->release(reader->id);
  for (uint64_t i = 0; i <= 100; ++i) EXPECT_EQ(store->stat(kTenant, key_of(i), 0).is_ok(), i % 2 == 0) << i;
  EXPECT_EQ(use_of(*store, 2).blocks, 0u);
  EXPECT_EQ(use_of(*store, 1).blocks, 50u);
  EXPECT_EQ(use_of(*store, 0).blocks, 1u);
  is_sound(*store);
}

TEST(Writers, ARecallIsOfATimeAndLastsForWhatComesLater) {
  auto config = small_config(4 * kMiB);
  const auto clock = std::make_shared<std::atomic<uint64_t>>((kOriginEpochUnixS + 1000) * 1000);
  config.disk.wall_clock = [clock] { return clock->load(); };
  const auto store = open_store(config);
  const WriterNumber bad = store->open_writer(named(2));
  for (uint64_t i = 0; i < 10; ++i) {
    ASSERT_EQ(put_by(*store, bad, i), Code::kOk);
    *clock += 10'000;
  }
  EXPECT_EQ(use_of(*store, 2).first_s, 1000u);
  EXPECT_EQ(use_of(*store, 2).last_s, 1090u);
  EXPECT_EQ(recall_all(*store, {.writer = 2, .since_s = 1030, .until_s = 1050}).blocks, 3u);
  for (uint64_t i = 0; i < 10; ++i)
    EXPECT_EQ(store->stat(kTenant, key_of(i), 0).is_ok(), i < 3 || i > 5) << i;

  // A copy of a recalled block, which another node made before it heard of the recall.
  ASSERT_EQ(put_by(*store, 0, 50), Code::kOk);
  EXPECT_EQ(store->set_origin(kTenant, key_of(50), {2, 1040}), Code::kReservationUnknown);
  EXPECT_FALSE(store->stat(kTenant, key_of(50), 0));
  ASSERT_EQ(put_by(*store, 0, 51), Code::kOk);
  EXPECT_EQ(store->set_origin(kTenant, key_of(51), {2, 1060}), Code::kOk);
  EXPECT_EQ(store->origins(kTenant, std::vector{key_of(51)})[0], (Origin{2, 1060}));
  EXPECT_EQ(store->set_origin(kTenant, key_of(52), {2, 1060}), Code::kNotFound);

  EXPECT_EQ(recall_all(*store, {.writer = 2, .refuse_s = 60}).blocks, 8u);
  *clock += 59'000;
  EXPECT_EQ(put_by(*store, bad, 60), Code::kReservationUnknown) << "it is refused for a while";
  *clock += 2'000;
  EXPECT_EQ(put_by(*store, bad, 60), Code::kOk);
  is_sound(*store);
}

TEST(Writers, ARefusalWithoutAnEndOutlastsOtherRecallsUntilItIsLifted) {
  auto config = small_config(4 * kMiB);
  const auto clock = std::make_shared<std::atomic<uint64_t>>(kOriginEpochUnixS * 1000 + 1'000'000);
  config.disk.wall_clock = [clock] { return clock->load(); };
  const auto store = open_store(config);
  const WriterNumber bad = store->open_writer(named(2));
  ASSERT_EQ(put_by(*store, bad, 0), Code::kOk);
  const RecallRequest forever{.writer = 2, .refuse_s = RecallRequest::kUntilLifted};
  EXPECT_EQ(recall_all(*store, forever).blocks, 1u);
  for (uint64_t other = 10; other < 600; ++other) {
    *clock += 1'000;
    recall_all(*store, {.writer = other, .refuse_s = 60});
  }
  recall_all(*store, forever);
  EXPECT_EQ(put_by(*store, bad, 1), Code::kReservationUnknown);
  store->lift(2);
  EXPECT_EQ(put_by(*store, bad, 2), Code::kReservationUnknown) << "of the second in which it was recalled";
  *clock += 1'000;
  EXPECT_EQ(put_by(*store, bad, 3), Code::kOk);
  store->lift(3);
  is_sound(*store);
}

TEST(Writers, ARecordSaysItsOriginAndAFormerOneNone) {
  const Uuid uuid{std::byte{7}};
  RecordHeader header;
  header.sequence = 3;
  header.key = key_of(1);
  header.size = 5;
  std::array<std::byte, kRecordHeaderBytes> former{}, bytes{};
  header.encode(uuid, former);
  EXPECT_EQ(RecordHeader::decode(uuid, 3, former)->origin, Origin{});
  for (size_t at = 112; at < 124; ++at) EXPECT_EQ(former[at], std::byte{0});
  header.origin = {0x1122334455667788, 77};
  header.encode(uuid, bytes);
  EXPECT_EQ(RecordHeader::decode(uuid, 3, bytes)->origin, header.origin);
  header.flags = RecordHeader::kEncrypted;
  header.key_id = 9;
  header.tag.fill(std::byte{0xee});
  header.encode(uuid, bytes);
  const auto again = RecordHeader::decode(uuid, 3, bytes);
  ASSERT_TRUE(again);
  EXPECT_EQ(again->origin, Origin{}) << "there is no room for it";
  EXPECT_EQ(again->tag, header.tag);
  bytes[115] ^= std::byte{1};
  EXPECT_FALSE(RecordHeader::decode(uuid, 3, bytes));
}

TEST(Writers, AFooterNamesThemByTheirPlace) {
  const Uuid uuid{std::byte{7}};
  FooterTrailer trailer;
  for (uint64_t id = 1; id <= kFooterWriters; ++id) trailer.writers.push_back(id << 32);
  std::array<std::byte, kPageBytes> page{};
  trailer.encode(uuid, page);
  const auto found = FooterTrailer::decode(uuid, kMiB, page);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->writers, trailer.writers);
  FooterEntry entry;
  entry.header.origin = {255ull << 32, 61};
  std::array<std::byte, kFooterEntryBytes> bytes{};
  entry.encode(bytes, trailer.writers);
  EXPECT_EQ(FooterEntry::decode(bytes, found->writers).header.origin, (Origin{255ull << 32, 60}))
      << "in minutes";
  EXPECT_EQ(FooterEntry::decode(bytes, std::vector<uint64_t>{1}).header.origin, Origin{})
      << "a place that the trailer does not have";
  trailer.writers.push_back(1);
  trailer.encode(uuid, page);
  EXPECT_FALSE(FooterTrailer::decode(uuid, kMiB, page));
}

TEST(Writers, TheIndexOfADiskCountsByTenantAndWriter) {
  DiskIndex index(7);
  for (uint64_t i = 0; i < 60; ++i)
    ASSERT_NE(index.put(i % 2, key_of(i), 100, {1, 0}, true, false, 0, {i % 3, uint32_t(i)}), store::kNone);
  EXPECT_EQ(index.bytes_of(TenantId{0}), 3000u) << "of all writers";
  uint64_t blocks = 0;
  for (const DiskUse& use : index.uses()) {
    EXPECT_EQ(use.blocks, 10u);
    blocks += use.blocks;
  }
  EXPECT_EQ(blocks, 60u);
  ASSERT_NE(index.put(0, key_of(0), 50, {2, 0}, true, false, 0, {9, 1}), store::kNone) << "another writer";
  EXPECT_EQ(index.writer_of(index[index.find(0, key_of(0))]), 9u);
  EXPECT_EQ(index.bytes_of(TenantId{0}), 2950u);
  for (uint64_t i = 0; i < 60; ++i) index.erase(index.find(i % 2, key_of(i)));
  EXPECT_EQ(index.bytes_of(TenantId{0}), 0u);
  EXPECT_EQ(index.bytes(), 0u);
  for (uint64_t writer = 1; writer <= 70'000; ++writer) {
    ASSERT_NE(index.put(5, key_of(1), 10, {1, 0}, true, false, 0, {writer, 0}), store::kNone) << writer;
  }
  EXPECT_LT(index.uses().size(), 20u) << "the numbers of owners without blocks are used again";
  for (uint64_t writer = 1; writer <= 66'000; ++writer) {
    ASSERT_NE(index.put(5, key_of(writer), 10, {1, 0}, true, false, 0, {writer, 0}), store::kNone) << writer;
  }
  EXPECT_EQ(index.writer_of(index[index.find(5, key_of(66'000))]), 0u) << "no number is left: unknown";
  EXPECT_EQ(index.bytes_of(TenantId{5}), 660'000u);
}

class WritersOnDisk : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = test_folder();
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override {
    store_.reset();
    std::filesystem::remove_all(folder_);
  }
  void open() {
    store_.reset();
    StoreConfig config = small_config(kMiB);
    config.eviction = "lru";
    config.disk.paths = {folder_.string()};
    config.disk.bytes = 64 * kMiB;
    config.disk.stall_ms = 60'000;
    store_ = open_store(config);
  }
  // Blocks by `writers` writers in turn; 600 of them are more than memory has.
  void write(uint64_t writers) {
    for (uint64_t i = 0; i < 600; ++i) {
      const WriterNumber number = store_->open_writer(named(1 + i % writers));
      ASSERT_NE(number, 0);
      ASSERT_EQ(put_by(*store_, number, i), Code::kOk);
      store_->close_writer(number);
      for (int tries = 0; i > 250 && disk_counter(*store_, "ssd_blocks") + 235 < i && tries < 400; ++tries)
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }
  std::vector<uint64_t> below() {
    std::vector<uint64_t> found;
    for (uint64_t i = 0; i < 600; ++i) {
      const auto info = store_->stat(kTenant, key_of(i), 0);
      if (info && info->tier == Tier::kSsd) found.push_back(i);
    }
    return found;
  }

  std::filesystem::path folder_;
  std::unique_ptr<Store> store_;
};

TEST_F(WritersOnDisk, AStartKnowsThemFromFooters) {
  open();
  write(10);
  open();
  const auto found = below();
  ASSERT_GT(found.size(), 300u);
  for (const uint64_t i : found) {
    const Origin origin = store_->origins(kTenant, std::vector{key_of(i)})[0];
    EXPECT_EQ(origin.writer, 1 + i % 10);
    EXPECT_NE(origin.written_s, 0u) << "of its record";
  }
  EXPECT_EQ(use_of(*store_, 0).disk_blocks, 0u);
}

TEST_F(WritersOnDisk, AStartKnowsMoreThanAFooterCanName) {
  open();
  write(kFooterWriters + 45);
  open();
  const auto found = below();
  ASSERT_GT(found.size(), 300u);
  for (const uint64_t i : found)
    EXPECT_EQ(store_->origins(kTenant, std::vector{key_of(i)})[0].writer, 1 + i % (kFooterWriters + 45));
}

TEST_F(WritersOnDisk, ARecallLastsOverAStart) {
  open();
  write(3);
  const Recalled done = recall_all(*store_, {.writer = 2});
  EXPECT_GT(done.blocks, 20u);
  EXPECT_GT(done.disk_blocks, 20u);
  EXPECT_EQ(done.failed_blocks, 0u);
  for (const bool again : {false, true}) {
    if (again) open();
    for (const uint64_t i : below()) EXPECT_NE(1 + i % 3, 2u) << i;
    EXPECT_EQ(use_of(*store_, 2).blocks + use_of(*store_, 2).disk_blocks, 0u);
    EXPECT_GT(use_of(*store_, 3).disk_blocks, 50u);
  }
  is_sound(*store_);
}

}  // namespace
}  // namespace mooncache::test
