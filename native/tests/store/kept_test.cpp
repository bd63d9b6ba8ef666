// Memory that outlives its process: what comes back, what does not, and that nothing in it is believed.
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <set>

#include "store/catalogue.h"
#include "store/fault_seed.h"
#include "store/kept_fixture.h"
#include "store/memfd.h"

namespace mooncache::test {
namespace {

class KeptStore : public ::testing::Test {
 protected:
  void start(StoreConfig config) {
    store_.reset();
    store_ = open_store(config);
    ASSERT_NE(store_, nullptr);
    holder_.keep(*store_);
  }
  // What kill -9 leaves: nothing is written at the end of a store.
  void restart(uint64_t capacity_bytes) {
    store_.reset();
    store_ = open_store(kept_config(capacity_bytes, holder_.fds()));
    ASSERT_NE(store_, nullptr);
  }
  std::unique_ptr<Store> store_;
  FilesHolder holder_;
};

TEST_F(KeptStore, CommittedBlocksComeBackAndNothingElse) {
  StoreConfig config = kept_config(kMiB);
  config.arena_bytes = kMiB / 4;
  start(config);
  for (uint64_t number = 0; number < 200; ++number)
    ASSERT_EQ(put(*store_, number, 100 + number * 7, 5, number % 3), Code::kOk);
  ASSERT_EQ(store_->remove(0, key_of(3), RemoveReason::kRemoved, 6), Code::kOk);
  ASSERT_TRUE(store_->reserve(kTenant, key_of(1000), 640, 6).is_ok());  // never committed
  const StoreStats before = store_->stats();
  config.keep.fds = holder_.fds();
  store_.reset();
  store_ = open_store(config);
  const KeptMemory kept = store_->kept();
  EXPECT_TRUE(kept.adopted) << kept.why_not;
  EXPECT_EQ(kept.blocks, 199u);
  EXPECT_EQ(kept.refused, 0u);
  EXPECT_EQ(kept.held_blocks, 1u);
  EXPECT_SOUND(*store_);
  for (uint64_t number = 0; number < 200; ++number)
    EXPECT_EQ(reads_right(*store_, number, number % 3), number != 3) << number;
  EXPECT_FALSE(present(*store_, 1000));
  EXPECT_EQ(store_->stats().used_bytes, before.used_bytes);
  const KeptProgress progress = store_->tend_kept(~uint64_t{0} >> 1);
  EXPECT_EQ(progress.checked_blocks, 199u);
  EXPECT_EQ(progress.damaged_blocks, 0u);
  EXPECT_EQ(progress.held_blocks, 0u) << "nobody else has a writable descriptor";
  EXPECT_EQ(store_->stats().reserved_bytes, 0u);
  EXPECT_SOUND(*store_);
}

TEST_F(KeptStore, TheColdestStillGoesFirst) {
  start(kept_config(64 * 1024));
  for (uint64_t number = 0; number < 64; ++number) ASSERT_EQ(put(*store_, number, 1024, 1), Code::kOk);
  for (uint64_t number = 0; number < 8; ++number) ASSERT_TRUE(reads_right(*store_, number));
  (void)store_->tend_kept(0);
  restart(64 * 1024);
  (void)store_->tend_kept(~uint64_t{0} >> 1);
  for (uint64_t number = 100; number < 150; ++number) ASSERT_EQ(put(*store_, number, 1024, 9), Code::kOk);
  for (uint64_t number = 0; number < 8; ++number) EXPECT_TRUE(present(*store_, number)) << number;
  EXPECT_FALSE(present(*store_, 20));
  EXPECT_SOUND(*store_);
}

// Blocks, what tenants have, what is held and who goes first do not depend on the number of threads.
TEST_F(KeptStore, ManyThreadsAdoptWhatOneDoes) {
  for (const uint32_t threads : {1u, 2u, 3u, 5u, 8u, 64u}) {
    SCOPED_TRACE(threads);
    StoreConfig config = kept_config(640 * 1024);
    start(config);
    for (uint64_t number = 0; number < 600; ++number)
      ASSERT_EQ(put(*store_, number, 1000, 1, number % 3), Code::kOk);
    for (uint64_t number = 0; number < 600; number += 5)
      ASSERT_TRUE(reads_right(*store_, number, number % 3));
    ASSERT_TRUE(store_->reserve(1, key_of(1000), 1000, 6).is_ok());
    (void)store_->tend_kept(0);
    config.keep.fds = holder_.fds();
    config.keep.adopting_threads = threads;
    store_.reset();
    store_ = open_store(config);
    const KeptMemory kept = store_->kept();
    EXPECT_EQ(kept.adopting_threads, std::min(threads, config.shards));
    EXPECT_EQ(kept.blocks, 600u);
    EXPECT_EQ(kept.bytes, 600'000u);
    EXPECT_EQ(kept.refused, 0u);
    EXPECT_EQ(kept.held_blocks, 1u);
    EXPECT_SOUND(*store_);
    for (const TenantUsage& usage : store_->tenants()) {
      EXPECT_EQ(usage.blocks, 200u);
      EXPECT_EQ(usage.bytes, usage.tenant == 1 ? 201'000u : 200'000u);
    }
    for (uint64_t number = 2000; number < 2100; ++number) ASSERT_EQ(put(*store_, number, 1000, 9), Code::kOk);
    bool stayed = false;  // one that was as cold and came later
    for (uint64_t number = 0; number < 600; ++number) {
      const bool there = store_->stat(number % 3, key_of(number), 9).is_ok();
      EXPECT_TRUE(there || (number % 5 != 0 && !stayed)) << number;
      stayed = stayed || (there && number % 5 != 0);
    }
    EXPECT_FALSE(store_->stat(1, key_of(1), 9).is_ok());
    EXPECT_EQ(store_->tend_kept(~uint64_t{0} >> 1).damaged_blocks, 0u);
    EXPECT_SOUND(*store_);
  }
}

TEST_F(KeptStore, ADamagedBlockIsAMiss) {
  start(kept_config(kMiB));
  for (uint64_t number = 0; number < 50; ++number) ASSERT_EQ(put(*store_, number, 2000, 1), Code::kOk);
  ASSERT_EQ(store_->flip_bit(kTenant, key_of(17), 4321), Code::kOk);
  restart(kMiB);
  EXPECT_EQ(store_->kept().blocks, 50u);
  const KeptProgress some = store_->tend_kept(10 * 2000);
  EXPECT_EQ(some.checked_blocks, 10u);
  EXPECT_EQ(some.left_blocks, 40u);
  const KeptProgress all = store_->tend_kept(~uint64_t{0} >> 1);
  EXPECT_EQ(all.damaged_blocks, 1u);
  EXPECT_EQ(all.left_blocks, 0u);
  EXPECT_FALSE(present(*store_, 17));
  EXPECT_EQ(store_->stats().removed[static_cast<size_t>(RemoveReason::kCorrupt)], 1u);
  restart(kMiB);
  EXPECT_EQ(store_->kept().blocks, 49u);
}

// The same for each generation: a restart of a restart.
TEST_F(KeptStore, MemoryServesManyProcesses) {
  start(kept_config(kMiB));
  for (uint64_t round = 0; round < 5; ++round) {
    ASSERT_EQ(put(*store_, round, 500, 1), Code::kOk);
    if (round > 0) {
      ASSERT_EQ(store_->remove(kTenant, key_of(round - 1), RemoveReason::kRemoved, 1), Code::kOk);
    }
    restart(kMiB);
    EXPECT_EQ(store_->kept().blocks, 1u);
    EXPECT_TRUE(reads_right(*store_, round));
    EXPECT_SOUND(*store_);
  }
}

TEST_F(KeptStore, OneProcessAtATime) {
  start(kept_config(kMiB));
  ASSERT_EQ(put(*store_, 1, 500, 1), Code::kOk);
  EXPECT_EQ(Store::open(kept_config(kMiB, holder_.fds())).code(), Code::kAlreadyExists);
  EXPECT_TRUE(reads_right(*store_, 1));
}

TEST_F(KeptStore, AWriterThatLivesKeepsItsExtent) {
  start(kept_config(kMiB));
  const auto writing = store_->reserve(kTenant, key_of(1), 4096, 1);
  ASSERT_TRUE(writing.is_ok());
  const SegmentFd arena = store_->segments().front();
  const int passed = ::fcntl(arena.fd_rw, F_DUPFD_CLOEXEC, 0);  // as a message carries it
  auto* const mapped =
      static_cast<std::byte*>(::mmap(nullptr, arena.size, PROT_READ | PROT_WRITE, MAP_SHARED, passed, 0));
  ASSERT_NE(mapped, MAP_FAILED);
  ::close(passed);
  for (int process = 0; process < 2; ++process) {
    restart(kMiB);
    EXPECT_EQ(store_->kept().held_blocks, 1u);
    EXPECT_EQ(store_->tend_kept(0).held_blocks, 1u);
    EXPECT_EQ(store_->stats().reserved_bytes, 4096u);
    EXPECT_SOUND(*store_);
  }
  std::memset(mapped + writing->extent.offset, 0xff, 4096);  // late, and into nobody's block
  for (uint64_t number = 10; number < 400; ++number) ASSERT_EQ(put(*store_, number, 4096, 2), Code::kOk);
  std::memset(mapped + writing->extent.offset, 0xee, 4096);
  EXPECT_TRUE(reads_right(*store_, 399));
  ::munmap(mapped, arena.size);
  EXPECT_EQ(store_->tend_kept(0).held_blocks, 0u);
  EXPECT_EQ(store_->stats().reserved_bytes, 0u);
  EXPECT_SOUND(*store_);
}

TEST_F(KeptStore, AnotherShapeIsAColdStartWithAReason) {
  start(kept_config(kMiB));
  ASSERT_EQ(put(*store_, 1, 500, 1), Code::kOk);
  store_.reset();
  const auto cold = [&](auto change) {
    StoreConfig config = kept_config(kMiB, holder_.fds());
    change(config);
    auto store = open_store(config);
    EXPECT_FALSE(store->kept().adopted);
    EXPECT_EQ(store->stats().blocks, 0u);
    EXPECT_EQ(put(*store, 2, 500, 1), Code::kOk);
    EXPECT_SOUND(*store);
    return store->kept().why_not;
  };
  EXPECT_NE(cold([](StoreConfig& config) { config.capacity_bytes *= 2; }), "");
  EXPECT_NE(cold([](StoreConfig& config) { config.quantum_bytes *= 2; }), "");
  EXPECT_NE(cold([](StoreConfig& config) { config.shards = 4; }), "");
  EXPECT_NE(cold([](StoreConfig& config) { config.arena_bytes = kMiB / 2; }), "");
  EXPECT_EQ(cold([](StoreConfig& config) { config.keep.node_id = "other"; }),
            "the kept memory is another node's");
  EXPECT_NE(cold([](StoreConfig& config) { std::swap(config.keep.fds[1], config.keep.fds[2]); }), "");
  const auto catalogue = holder_.bytes(0);
  catalogue[8] ^= std::byte{2};
  EXPECT_EQ(cold([](StoreConfig&) {}), "the kept memory has layout version 3, this is 1");
  catalogue[8] ^= std::byte{2};
  ::munmap(catalogue.data(), catalogue.size());
  restart(kMiB);
  EXPECT_EQ(store_->kept().blocks, 1u) << "nothing was changed by those who refused it";
}

TEST_F(KeptStore, OnlyAnonymousMemoryIsKept) {
  StoreConfig config = kept_config(kMiB);
  config.arena_path = "/tmp";
  EXPECT_EQ(Store::open(config).code(), Code::kConfigInvalid);
}

TEST_F(KeptStore, AFileThatCouldShrinkIsRefused) {
  const int plain = ::memfd_create("plain", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  ASSERT_EQ(::ftruncate(plain, 1 << 20), 0);
  EXPECT_EQ(store::Memfd::adopt(plain, 1 << 20, {}).code(), Code::kConfigInvalid);
  ::close(plain);
  EXPECT_EQ(store::Memfd::adopt(-1, 1 << 20, {}).code(), Code::kConfigInvalid);
}

// Any bytes in the catalogue, and any in the generations: the store opens, is sound, and a block that it
// returns has the bytes that belong to it.
TEST_F(KeptStore, TheCatalogueIsNotBelieved) {
  constexpr size_t kHeader = 4096, kRecord = 96;
  const uint64_t seed = fault_seed();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  for (int round = 0; round < 150; ++round) {
    holder_.drop();
    start(kept_config(256 * 1024));
    for (uint64_t number = 0; number < 60; ++number)
      ASSERT_EQ(put(*store_, number, 64 + random() % 3000, 1), Code::kOk);
    store_.reset();
    const auto catalogue = holder_.bytes(0), generations = holder_.bytes(1);
    const auto record = [&] { return catalogue.subspan(kHeader + random() % 80 * kRecord, kRecord); };
    for (int change = 0; change < 20; ++change) {
      const auto one = record(), other = record();
      switch (random() % 4) {
        case 0:
          one[random() % kRecord] ^= static_cast<std::byte>(1u << (random() % 8));
          break;
        case 1:
          std::copy(other.begin(), other.end(), one.begin());
          break;
        case 2:
          for (auto& byte : one) byte = static_cast<std::byte>(random());
          break;
        default:
          generations[random() % 640] ^= static_cast<std::byte>(1u << (random() % 8));
      }
    }
    ::munmap(catalogue.data(), catalogue.size());
    ::munmap(generations.data(), generations.size());
    restart(256 * 1024);
    ASSERT_TRUE(store_->kept().adopted) << store_->kept().why_not;
    EXPECT_SOUND(*store_);
    for (uint64_t number = 0; number < 60; ++number)
      EXPECT_EQ(reads_right(*store_, number), present(*store_, number)) << number;
    EXPECT_EQ(store_->tend_kept(~uint64_t{0} >> 1).damaged_blocks, 0u);
    EXPECT_SOUND(*store_);
  }
}

// Records that are right each for itself, but claim each other's bytes.
TEST(KeptCatalogue, RecordsThatOverlapAreRefused) {
  const uint64_t seed = fault_seed();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  for (int round = 0; round < 100; ++round) {
    FilesHolder holder;
    auto store = open_store(kept_config(64 * 1024));
    holder.keep(*store);
    const store::CatalogueShape shape{"node",    64,         8, (64 * 1024 / 64 / 8 * 5 / 4 + 64) * 8,
                                      64 * 1024, {64 * 1024}};
    store.reset();
    {
      auto catalogue = store::Catalogue::adopt(holder.fds()[0], shape);
      ASSERT_TRUE(catalogue.is_ok()) << catalogue.status().message;
      for (uint32_t slot = 0; slot < 200; ++slot) {
        const uint64_t size = 1 + random() % 900;
        const auto offset = static_cast<uint32_t>(random() % 1024);
        catalogue->reserve(slot, {key_of(random()), 1, size, 0, 0, offset, 0, 0});
        if (random() % 4 != 0) catalogue->commit(slot, 1, 0, 1);
      }
    }
    store = open_store(kept_config(64 * 1024, holder.fds()));
    ASSERT_TRUE(store->kept().adopted) << store->kept().why_not;
    EXPECT_GT(store->kept().refused, 0u);
    EXPECT_SOUND(*store);
    (void)store->tend_kept(~uint64_t{0} >> 1);
    EXPECT_EQ(store->stats().used_bytes, 0u) << "no block had its checksum, and no writer lives";
    EXPECT_SOUND(*store);
  }
}

struct Said {
  uint64_t number;
  uint64_t committed;  // 0 = removed
};

// Puts and removes until it is killed, and says after each that it is through.
[[noreturn]] void write_until_killed(const StoreConfig& config, int to, uint64_t seed) {
  std::mt19937_64 random(seed);
  auto store = Store::open(config);
  if (!store) ::_exit(1);
  for (;;) {
    const uint64_t number = random() % 400;
    const bool there = (*store)->stat(kTenant, key_of(number), 0).is_ok();
    const bool through =
        there ? (*store)->remove(kTenant, key_of(number), RemoveReason::kRemoved, 1) == Code::kOk
              : put(**store, number, 64 + random() % 2000, 1) == Code::kOk;
    const Said said{number, there ? 0u : 1u};
    if (through && ::write(to, &said, sizeof said) != sizeof said) ::_exit(1);
  }
}

// A process that is killed at any instruction: what it said is kept, and what it had begun is there whole or
// not at all.
TEST(KeptStoreKilled, AtAnyMoment) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "the sanitizer has threads of its own, which a child after fork() lacks";
#endif
  const uint64_t seed = fault_seed();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  FilesHolder holder;
  std::set<uint64_t> expected;
  for (int round = 0; round < 12; ++round) {
    auto store = open_store(kept_config(2 * kMiB, holder.fds()));
    ASSERT_NE(store, nullptr);
    if (round == 0) holder.keep(*store);
    store.reset();
    int ends[2];
    ASSERT_EQ(::pipe(ends), 0);
    const pid_t child = ::fork();
    if (child == 0) write_until_killed(kept_config(2 * kMiB, holder.fds()), ends[1], seed + round);
    ::close(ends[1]);
    Said said{};
    const uint64_t reports = 50 + random() % 2000;
    for (uint64_t count = 0; count < reports && ::read(ends[0], &said, sizeof said) == sizeof said; ++count)
      said.committed != 0 ? (void)expected.insert(said.number) : (void)expected.erase(said.number);
    ASSERT_EQ(::kill(child, SIGKILL), 0);
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status));
    while (::read(ends[0], &said, sizeof said) == sizeof said)
      said.committed != 0 ? (void)expected.insert(said.number) : (void)expected.erase(said.number);
    ::close(ends[0]);

    store = open_store(kept_config(2 * kMiB, holder.fds()));
    ASSERT_NE(store, nullptr);
    ASSERT_TRUE(store->kept().adopted) << store->kept().why_not;
    EXPECT_SOUND(*store);
    EXPECT_EQ(store->kept().refused, 0u);
    uint64_t differ = 0;
    for (uint64_t number = 0; number < 400; ++number) {
      const bool there = present(*store, number);
      EXPECT_EQ(reads_right(*store, number), there) << number;
      if (there == expected.contains(number)) continue;
      ++differ;  // its last change was through, and not said any more
      there ? (void)expected.insert(number) : (void)expected.erase(number);
    }
    EXPECT_LE(differ, 1u);
    EXPECT_EQ(store->tend_kept(~uint64_t{0} >> 1).damaged_blocks, 0u);
    EXPECT_SOUND(*store);
  }
}

}  // namespace
}  // namespace mooncache::test
