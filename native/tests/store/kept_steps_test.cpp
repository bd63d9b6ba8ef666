// A process that is killed after each single store to the memory that outlives it, and what the next one
// adopts.
//
// Each step of the protocol is recorded (memory_steps.h). Then, for every store of it:
//   killed     the files as that store left them are adopted;
//   torn       of a store of several words only the first ones, or only the last ones, arrived;
//   reordered  all stores of the step but one, one alone, those from one on, and random sets of them;
//   adopted    the adoption itself is killed after each of its own stores, and what it leaves is adopted.
// What was committed and is not part of the step is there, what was removed is not, and no byte is wrong.
#include <algorithm>
#include <filesystem>
#include <functional>
#include <future>
#include <map>
#include <set>

#include "store/catalogue.h"
#include "store/fault_seed.h"
#include "store/kept_fixture.h"

#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__)
#define MOONCACHE_RECORDS_STORES 1
#include "store/memory_steps.h"
#endif

extern "C" {
void* __real_mmap(void* at, size_t bytes, int protection, int flags, int fd, off_t offset);
int __real_munmap(void* at, size_t bytes);

void* __wrap_mmap(void* at, size_t bytes, int protection, int flags, int fd, off_t offset) {
  void* const got = __real_mmap(at, bytes, protection, flags, fd, offset);
#ifdef MOONCACHE_RECORDS_STORES
  if (got != MAP_FAILED) mooncache::test::MemorySteps::mapped(got, bytes, protection, fd);
#endif
  return got;
}
int __wrap_munmap(void* at, size_t bytes) {
#ifdef MOONCACHE_RECORDS_STORES
  mooncache::test::MemorySteps::unmapped(at);
#endif
  return __real_munmap(at, bytes);
}
}

namespace mooncache::test {
namespace {

#ifndef MOONCACHE_RECORDS_STORES
TEST(KeptKilledAtEachStore, OnThisProcessor) {
  GTEST_SKIP()
      << "stores are recorded with the trap flag of x86-64, and the sanitizer of threads delays signals";
}
#else

constexpr uint64_t kStepsCapacity = 16 * 1024, kStepsArena = kStepsCapacity / 2;
constexpr uint32_t kStepsShards = 2, kStepsExpected = 1024;
constexpr uint64_t kStepsSlots = (kStepsCapacity / kStepsExpected / kStepsShards * 5 / 4 + 64) * kStepsShards;
constexpr TenantId kPurgedTenant = 8, kLimitedTenant = 9;
constexpr uint64_t kLookMs = 100'000;  // later than all that happens
constexpr uint64_t kAllBytes = ~uint64_t{0} >> 1;

class KeptKilledAtEachStore : public ::testing::Test {
 protected:
  struct Known {
    TenantId tenant = 0;
    std::vector<std::byte> content;
  };
  struct Seen {
    Origin origin;
    uint64_t age_ms = 0;
    Extent extent;
  };
  using Present = std::map<uint64_t, Seen>;
  using Placed = std::pair<uint64_t, Extent>;
  // What the blocks are at both ends of a step.
  struct Ends {
    Present before, after;
    bool in_order = true;  // the stores arrived as they were made: whole, and none after one that is missing
  };

  void SetUp() override {
    const MemoryImage empty = empty_image();
    files_ = std::make_unique<KeptFiles>(empty);
    other_files_ = std::make_unique<KeptFiles>(empty);
    steps_ = std::make_unique<MemorySteps>(files_->fds());
    other_steps_ = std::make_unique<MemorySteps>(other_files_->fds());
    store_ = open_store(config_of(*files_));
    ASSERT_NE(store_, nullptr);
    ASSERT_TRUE(store_->kept().adopted) << store_->kept().why_not;
    // Slots in several pages of the catalogue, some of them used before, the highest ones too.
    constexpr uint64_t kFirst = 44;
    for (uint64_t number = 1; number <= kFirst; ++number) put(number, 64 + number * 37 % 200);
    for (uint64_t number = 1; number <= kFirst; ++number) {
      if (number % 11 <= 1 || number == kFirst - 1) continue;
      ASSERT_EQ(store_->remove(kTenant, key_of(number), RemoveReason::kRemoved, now_ms_), Code::kOk);
    }
  }
  void TearDown() override {
    store_.reset();
    if (!folder_.empty()) std::filesystem::remove_all(folder_);
    EXPECT_GT(points_, 100u) << "stores were recorded";
    RecordProperty("points", static_cast<int>(points_));
  }

  // With seeds that the test's own seed decides, so that a failure can be repeated.
  MemoryImage empty_image() const {
    store::Catalogue::Seeds seeds;
    for (size_t at = 0; at < seeds.size(); ++at)
      seeds[at] = (fault_seed() * 0x9e3779b97f4a7c15ull + at) * 2 + 1;
    const store::CatalogueShape shape{
        "node", 64, kStepsShards, kStepsSlots, kStepsCapacity, {kStepsArena, kStepsArena}};
    const auto catalogue = store::Catalogue::create(shape, seeds);
    EXPECT_TRUE(catalogue.is_ok());
    const store::Memfd& file = catalogue->file();
    constexpr size_t kPage = 4096;
    constexpr size_t kTable = (kStepsSlots * sizeof(uint64_t) + kPage - 1) / kPage * kPage;
    return {{file.data(), file.data() + file.size_bytes()},
            std::vector<std::byte>(kTable),
            std::vector<std::byte>(kStepsArena),
            std::vector<std::byte>(kStepsArena)};
  }
  StoreConfig config_of(const KeptFiles& files) const {
    StoreConfig config = kept_config(kStepsCapacity, files.fds());
    config.keep.adopting_threads = 1;
    config.arena_bytes = kStepsArena;
    config.shards = kStepsShards;
    config.expected_block_bytes = kStepsExpected;
    config.event_log_capacity = 64;
    config.disk.wall_clock = [this] { return kOriginEpochUnixS * 1000 + wall_s_ * 1000; };
    config.disk.bytes = 64 * kMiB;
    config.disk.stall_ms = 60'000;  // a busy machine is no stalled disk
    if (&files == files_.get() && !folder_.empty()) config.disk.paths = {folder_};
    return config;
  }

  // --- what a node does ---
  void know(uint64_t number, uint64_t size, TenantId tenant) {
    std::vector<std::byte> content(size);
    fill({content.data(), size}, number);
    known_[number] = {tenant, std::move(content)};
  }
  void put(uint64_t number, uint64_t size, TenantId tenant = kTenant, WriterNumber writer = 0) {
    know(number, size, tenant);
    const auto reserved = store_->reserve(tenant, key_of(number), size, now_ms_, writer);
    ASSERT_TRUE(reserved.is_ok()) << number << ": " << reserved.status().message;
    ASSERT_EQ(store_->commit(reserved->id, write(reserved->id, number), now_ms_).code, Code::kOk);
  }
  uint32_t write(ReservationId id, uint64_t number) { return fill(store_->writable(id), number); }
  // What a client has written of it is foreign: no block has such bytes.
  ReservationId reserve(const char* what, uint64_t number, uint64_t size, TenantId tenant = kTenant,
                        WriterNumber writer = 0) {
    if (!known_.contains(number)) know(number, size, tenant);
    ReservationId id{};
    step(what, [&] {
      const auto reserved = store_->reserve(tenant, key_of(number), size, now_ms_, writer);
      if (reserved) id = reserved->id;
    });
    EXPECT_NE(id, ReservationId{}) << what;
    const Slice bytes = store_->writable(id);
    if (bytes.size > 0) std::memset(bytes.data, 0xa5, bytes.size);
    return id;
  }
  void commit(const char* what, ReservationId id, uint64_t number, Code expected = Code::kOk) {
    const uint32_t crc = write(id, number);
    Code code{};
    step(what, [&] { code = store_->commit(id, crc, now_ms_).code; });
    EXPECT_EQ(code, expected) << what;
  }
  PinId pinned(uint64_t number) {
    const auto pin = store_->acquire(known_[number].tenant, key_of(number), now_ms_);
    EXPECT_TRUE(pin.is_ok()) << number;
    return pin ? pin->id : PinId{};
  }
  Code remove(const char* what, uint64_t number) {
    Code code{};
    step(what, [&] {
      code = store_->remove(known_[number].tenant, key_of(number), RemoveReason::kRemoved, now_ms_);
    });
    return code;
  }
  static Purged purge_all(Store& store, TenantId tenant) {
    Purged all;
    do {
      const Purged page = store.purge(tenant, all.next_cursor);
      all.next_cursor = page.next_cursor;
      all.blocks += page.blocks;
      all.held_blocks += page.held_blocks;
    } while (all.next_cursor != 0);
    return all;
  }
  void die() {
    step("the end of the process", [&] { store_.reset(); });
    EXPECT_EQ(recorded_, 0u) << "a clean end is none";
  }
  void live_again() {
    step("adoption", [&] { store_ = open_store(config_of(*files_)); });
    ASSERT_NE(store_, nullptr);
    ASSERT_TRUE(store_->kept().adopted) << store_->kept().why_not;
  }

  // --- killed, torn, reordered ---
  Present look(const Store& store) const {
    Present present;
    for (const auto& [number, known] : known_) {
      const auto info = store.stat(known.tenant, key_of(number), kLookMs);
      if (info && info->tier == Tier::kDram) present[number] = {info->origin, info->age_ms, info->extent};
    }
    return present;
  }
  void step(const char* what, const std::function<void()>& act) {
    if (HasFailure()) return act();
    SCOPED_TRACE(std::string(what) + ", seed " + std::to_string(fault_seed()));
    const MemoryImage base = files_->image();
    Ends ends;
    ends.before = store_ ? look(*store_) : last_;
    const std::vector<StoredWord> words = steps_->record(act);
    ends.after = last_ = store_ ? look(*store_) : ends.before;
    recorded_ = words.size();
    kill_at_each(base, words, ends);
    if (!HasFailure()) tear(base, words, ends);
    if (!HasFailure()) reorder(base, words, ends);
  }
  static void apply(MemoryImage& image, const StoredWord& word) {
    std::memcpy(image[word.file].data() + word.offset, &word.value, sizeof word.value);
  }
  static std::string place_of(const std::vector<StoredWord>& words, size_t count) {
    std::string text = std::to_string(count) + " of " + std::to_string(words.size()) + " words";
    if (count == 0) return text;
    const StoredWord& last = words[count - 1];
    return text + ", the last one in file " + std::to_string(last.file) + " at " +
           std::to_string(last.offset) + " by store " + std::to_string(last.instruction);
  }
  static bool ends_store(const std::vector<StoredWord>& words, size_t count) {
    return count == words.size() || count == 0 || words[count].instruction != words[count - 1].instruction;
  }
  // Also in the middle of a store: its first words arrived.
  void kill_at_each(MemoryImage image, const std::vector<StoredWord>& words, const Ends& ends) {
    std::map<uint64_t, uint64_t> turns;  // how often the end of a step reached each block
    std::set<uint64_t> former;
    for (size_t count = 0; count <= words.size() && !HasFailure(); ++count) {
      if (count > 0) apply(image, words[count - 1]);
      SCOPED_TRACE("killed after " + place_of(words, count));
      const std::set<uint64_t> there = adopt(image, ends);
      for (const auto& [number, known] : known_) {
        if (count > 0 && there.contains(number) != former.contains(number)) ++turns[number];
        EXPECT_LE(turns[number], 1u) << number << " comes and goes";
        EXPECT_TRUE(count > 0 || there.contains(number) == ends.before.contains(number)) << number;
        EXPECT_TRUE(count < words.size() || there.contains(number) == ends.after.contains(number)) << number;
      }
      former = there;
      if (ends_store(words, count)) kill_adoption(image, ends, there);
    }
  }
  // The last words of a store arrived, its first ones did not.
  void tear(const MemoryImage& base, const std::vector<StoredWord>& words, const Ends& ends) {
    MemoryImage before = base;
    for (size_t begin = 0, end = 0; begin < words.size() && !HasFailure(); begin = end) {
      while (end < words.size() && words[end].instruction == words[begin].instruction) ++end;
      for (size_t from = begin + 1; from < end; ++from) {
        MemoryImage torn = before;
        for (size_t at = from; at < end; ++at) apply(torn, words[at]);
        SCOPED_TRACE("torn: without the first " + std::to_string(from - begin) + " words of " +
                     place_of(words, end));
        (void)adopt(torn, ends);
      }
      for (size_t at = begin; at < end; ++at) apply(before, words[at]);
    }
  }
  void reorder(const MemoryImage& base, const std::vector<StoredWord>& words, Ends ends) {
    constexpr size_t kMostRandom = 48;
    ends.in_order = false;
    const auto with = [&](const std::string& what, const auto& arrives) {
      if (HasFailure()) return;
      MemoryImage image = base;
      for (size_t at = 0; at < words.size(); ++at)
        if (arrives(at)) apply(image, words[at]);
      SCOPED_TRACE("reordered, " + what);
      (void)adopt(image, ends);
    };
    for (size_t one = 0; one < words.size(); ++one) {
      with("all but " + place_of(words, one + 1), [&](size_t at) { return at != one; });
      with("nothing but " + place_of(words, one + 1), [&](size_t at) { return at == one; });
      with("from there on: " + place_of(words, one + 1), [&](size_t at) { return at >= one; });
    }
    std::mt19937_64 random(fault_seed());
    for (size_t count = 0; count < std::min(2 * words.size(), kMostRandom); ++count)
      with("random set " + std::to_string(count), [&](size_t) { return random() % 2 == 0; });
  }

  // --- the next process ---
  // The blocks that are there.
  std::set<uint64_t> adopt(const MemoryImage& image, const Ends& ends) {
    ++points_;
    other_files_->set(image);
    const auto store = open_store(config_of(*other_files_));
    if (store == nullptr) return {};
    const KeptMemory kept = store->kept();
    EXPECT_TRUE(kept.adopted) << kept.why_not;
    EXPECT_SOUND(*store);
    std::set<uint64_t> there, slots;
    uint64_t steady = 0;
    for (const auto& [number, known] : known_) {
      const auto before = ends.before.find(number), after = ends.after.find(number);
      const bool was = before != ends.before.end(), is = after != ends.after.end();
      steady += was && is ? 1 : 0;
      const auto pin = store->acquire(known.tenant, key_of(number), kLookMs);
      EXPECT_TRUE(pin.is_ok() || !was || !is) << number << " is lost";
      if (!pin) continue;
      EXPECT_TRUE(was || is) << number << " was removed, and is back";
      slots.insert(pin->info.extent.slot);
      if (holds_right(*store, *pin, known, !ends.in_order && !(was && is))) there.insert(number);
      if (ends.in_order && (was || is))
        check_facts(number, pin->info, was ? before->second : after->second,
                    is ? after->second : before->second);
      store->release(pin->id);
    }
    EXPECT_EQ(kept.blocks, slots.size()) << "it has blocks that were never put";
    EXPECT_TRUE(!ends.in_order || kept.refused <= ends.before.size() + ends.after.size() - 2 * steady)
        << kept.refused << " records were refused";
    check_generations(slots);
    tend(*store, ends.in_order);
    return there;
  }
  // False: what differs from its checksum, which is a miss.
  static bool holds_right(const Store& store, const Pinned& pin, const Known& known, bool may_differ) {
    const ConstSlice bytes = store.readable(pin.id);
    const bool right = testing::same_bytes({bytes.data, bytes.size}, known.content);
    const bool is_served = crc32c({bytes.data, bytes.size}) == pin.info.crc32c;
    EXPECT_TRUE(right || (may_differ && !is_served)) << "wrong bytes";
    return right;
  }
  // Between the two ends of a change its time may be unknown: then every recall of either writer takes it.
  static void check_facts(uint64_t number, const BlockInfo& info, const Seen& was, const Seen& is) {
    const auto agrees = [&](const Origin& origin) {
      if (info.origin.writer != origin.writer) return false;
      return origin.writer == 0 || info.origin.written_s == origin.written_s ||
             (info.origin.written_s == 0 && was.origin != is.origin);
    };
    EXPECT_TRUE(agrees(was.origin) || agrees(is.origin))
        << number << " is of writer " << info.origin.writer << " at " << info.origin.written_s;
    EXPECT_TRUE(info.age_ms == was.age_ms || info.age_ms == is.age_ms) << number << ": " << info.age_ms;
  }
  // Who reads a block of the former process learns from its slot's generation that it is gone.
  void check_generations(const std::set<uint64_t>& slots) const {
    for (uint64_t slot = 0; slot < kStepsSlots; ++slot) {
      uint64_t generation = 0;
      std::memcpy(&generation, other_files_->bytes(1).data() + slot * sizeof generation, sizeof generation);
      if (generation == 0) continue;
      EXPECT_EQ(generation % 2 == 0, slots.contains(slot)) << "generation of slot " << slot;
    }
  }
  // No client of the former process lives, so nothing stays held, and what was purged is overwritten.
  void tend(Store& store, bool in_order) const {
    const KeptProgress progress = store.tend_kept(kAllBytes);
    EXPECT_TRUE(!in_order || progress.damaged_blocks == 0);
    EXPECT_EQ(progress.held_blocks, 0u);
    EXPECT_EQ(store.stats().reserved_bytes, 0u);
    EXPECT_SOUND(store);
    if (purged_.empty() || !in_order) return;
    (void)purge_all(store, kPurgedTenant);  // whoever got no answer asks again
    for (const auto& [number, extent] : purged_) {
      const auto left = other_files_->bytes(2 + extent.segment).subspan(extent.offset, extent.size);
      EXPECT_FALSE(testing::same_bytes(left, known_.at(number).content)) << number << " was not overwritten";
    }
  }
  void kill_adoption(const MemoryImage& base, const Ends& ends, const std::set<uint64_t>& there) {
    if (HasFailure()) return;
    other_files_->set(base);
    std::unique_ptr<Store> store;
    const std::vector<StoredWord> words = other_steps_->record([&] {
      store = open_store(config_of(*other_files_));
      if (store) (void)store->tend_kept(kAllBytes);
    });
    store.reset();
    EXPECT_FALSE(words.empty()) << "it counts processes";
    MemoryImage image = base;
    for (size_t count = 1; count <= words.size() && !HasFailure(); ++count) {
      apply(image, words[count - 1]);
      if (!ends_store(words, count)) continue;
      SCOPED_TRACE("adoption killed after " + place_of(words, count));
      EXPECT_EQ(adopt(image, ends), there);
    }
  }

  std::string folder_;  // of the disk below the live store; none of those that adopt has it
  std::map<uint64_t, Known> known_;
  std::vector<Placed> purged_;  // since their purge began
  Present last_;
  uint64_t now_ms_ = 1000, wall_s_ = 100;
  uint64_t points_ = 0, recorded_ = 0;
  std::unique_ptr<KeptFiles> files_, other_files_;
  std::unique_ptr<MemorySteps> steps_, other_steps_;
  std::unique_ptr<Store> store_;
};

TEST_F(KeptKilledAtEachStore, PutsAndRemovals) {
  WriterNumber writer = 0;
  step("a writer connects", [&] { writer = store_->open_writer({0x1111, "engine", "build", 0}); });
  EXPECT_EQ(recorded_, 1u);
  const ReservationId first = reserve("reserve", 100, 300, kTenant, writer);
  EXPECT_GE(recorded_, 6u);
  commit("commit", first, 100);
  const ReservationId given_up = reserve("reserve what is given up", 101, 200);
  step("abort", [&] { store_->abort(given_up); });
  const ReservationId half = reserve("reserve what stays incomplete", 102, 200);
  ASSERT_TRUE(store_->note_written(half, 0, 100, 1));
  step("incomplete", [&] { (void)store_->commit_written(half, 1, now_ms_); });
  const ReservationId wins = reserve("reserve", 103, 250), loses = reserve("reserve it twice", 103, 250);
  commit("the first of two", wins, 103);
  commit("the second of two", loses, 103, Code::kAlreadyExists);
  EXPECT_EQ(remove("remove", 103), Code::kOk);
  const ReservationId again = reserve("reserve what was removed", 103, 250);
  commit("commit what was removed", again, 103);

  const PinId reader = pinned(100);
  EXPECT_EQ(remove("remove while it is read", 100), Code::kOk);
  step("the end of its reader", [&] { store_->release(reader); });
  const PinId other = pinned(44);  // no block lies in a higher slot of its shard
  EXPECT_EQ(remove("remove the highest one while it is read", 44), Code::kOk);
  step("the end of that reader", [&] { store_->release(other); });
  const PinId sees = pinned(103);
  step("a reader sees damage", [&] { store_->quarantine(sees); });
  step("the end of the damaged one", [&] { store_->release(sees); });
  step("uses are noted", [&] { (void)store_->tend_kept(0); });
}

TEST_F(KeptKilledAtEachStore, Evictions) {
  for (uint64_t number = 50; store_->stats().free_bytes >= 512 && number < 90; ++number) put(number, 512);
  (void)store_->tend_kept(0);
  const uint64_t before = store_->stats().blocks;
  const ReservationId large = reserve("reserve that evicts", 120, 1500);
  EXPECT_LT(store_->stats().blocks, before);
  commit("commit in the place of others", large, 120);
  TenantLimits limits;
  limits.memory.quota_bytes = 1000;
  store_->set_limits(kLimitedTenant, limits);
  put(121, 450, kLimitedTenant);
  put(122, 450, kLimitedTenant);
  const ReservationId over = reserve("reserve over the quota", 123, 450, kLimitedTenant);
  commit("commit over the quota", over, 123);
  EXPECT_TRUE(!present(*store_, 121, kLimitedTenant) || !present(*store_, 122, kLimitedTenant));
}

TEST_F(KeptKilledAtEachStore, Purges) {
  for (uint64_t number = 60; number < 64; ++number) put(number, 130 + number, kPurgedTenant);
  const PinId reader = pinned(61), reads_removed = pinned(62);
  EXPECT_EQ(remove("remove while it is read", 62), Code::kOk);
  const ReservationId written = reserve("reserve of the tenant", 64, 200, kPurgedTenant);
  for (const uint64_t number : {60u, 61u, 63u})
    purged_.emplace_back(number, store_->stat(kPurgedTenant, key_of(number), now_ms_)->extent);
  Purged done;
  step("purge", [&] { done = purge_all(*store_, kPurgedTenant); });
  EXPECT_EQ(done.blocks, 2u);
  EXPECT_EQ(done.held_blocks, 3u);
  purged_.emplace_back(62, store_->pin_info(reads_removed, now_ms_)->extent);
  step("the end of a reader of what was purged", [&] { store_->release(reader); });
  step("the end of a reader of what was removed and purged", [&] { store_->release(reads_removed); });
  commit("commit of what was purged", written, 64, Code::kReservationUnknown);
}

TEST_F(KeptKilledAtEachStore, RecallsAndEndsOfLife) {
  const WriterNumber writer = store_->open_writer({0x2222, "engine", "build", 0});
  put(70, 100, kTenant, writer);
  put(71, 140, kTenant, writer);
  const ReservationId late = reserve("reserve of the writer", 72, 200, kTenant, writer);
  put(73, 90, kTenant, writer);
  wall_s_ = 150;
  put(74, 90);
  step("it was copied: another writer's", [&] {
    EXPECT_EQ(store_->set_origin(kTenant, key_of(74), {0x3333, 42}), Code::kOk);
  });
  step("the same of a writer that is known", [&] {
    EXPECT_EQ(store_->set_origin(kTenant, key_of(73), {0x3333, 43}), Code::kOk);
  });
  step("recall", [&] { (void)store_->recall({0x2222, 0, 1000, false, 0}, 0, now_ms_); });
  for (uint64_t shard = 1; shard < kStepsShards; ++shard)
    step("recall, the next page", [&] { (void)store_->recall({0x2222}, shard << 32, now_ms_); });
  EXPECT_FALSE(present(*store_, 70));
  EXPECT_TRUE(present(*store_, 73));
  commit("commit of what was recalled", late, 72, Code::kReservationUnknown);
  TenantLimits limits;
  limits.ttl_ms = 50;
  store_->set_limits(kLimitedTenant, limits);
  put(80, 100, kLimitedTenant);
  now_ms_ += 100;
  step("the end of a block's life", [&] { store_->tend_tenants(now_ms_, 4096); });
  EXPECT_FALSE(present(*store_, 80, kLimitedTenant));
}

TEST_F(KeptKilledAtEachStore, BlocksThatComeUp) {
  folder_ =
      (std::filesystem::temp_directory_path() / ("mooncache-steps-" + std::to_string(::getpid()))).string();
  std::filesystem::create_directories(folder_);
  die();
  live_again();
  const WriterNumber writer = store_->open_writer({0x4444, "engine", "build", 0});
  uint64_t number = 110, down = 0;
  const auto lies_in = [&](uint64_t of) {
    const auto info = store_->stat(kTenant, key_of(of), kLookMs);
    return info ? info->tier : Tier::kShared;  // which there is not
  };
  ASSERT_TRUE(eventually([&] {
    for (uint64_t of = 110; of < number && down == 0; ++of) down = lies_in(of) == Tier::kSsd ? of : 0;
    if (down == 0 && number < 250) put(number++, 512, kTenant, writer);
    return down != 0;
  }));
  ASSERT_TRUE(eventually([&] { return store_->stats().zombie_blocks == 0; }));
  step("a block comes up from the disk", [&] {
    using Came = std::promise<void>;
    const auto came = std::make_shared<Came>();
    if (store_->fetch(kTenant, key_of(down), [came] { came->set_value(); }))
      (void)came->get_future().wait_for(std::chrono::seconds(20));
  });
  EXPECT_EQ(lies_in(down), Tier::kDram);
  EXPECT_GE(recorded_, 6u);
}

TEST_F(KeptKilledAtEachStore, LivesOneAfterTheOther) {
  (void)reserve("reserve what is never committed", 90, 300);
  for (const uint64_t number : {1u, 44u}) {
    (void)pinned(number);
    EXPECT_EQ(remove("remove while it is read", number), Code::kOk);
  }
  die();
  live_again();
  EXPECT_EQ(store_->kept().held_blocks, 1u);
  step("what was held is free", [&] { (void)store_->tend_kept(kAllBytes); });
  EXPECT_GE(recorded_, 2u);
  const ReservationId id = reserve("reserve in the next life", 91, 300);
  commit("commit in the next life", id, 91);
  EXPECT_EQ(remove("remove in the next life", 91), Code::kOk);
  die();
  live_again();
  const ReservationId second = reserve("reserve in the third life", 92, 300);
  commit("commit in the third life", second, 92);
}

#endif

}  // namespace
}  // namespace mooncache::test
