// The host loses its power, once and again on one disk, whose cache loses what was not synced. Nothing wrong
// is returned, what was removed stays removed, and what was synced is there or was reported as lost. A disk
// that answers a sync and does nothing may lose anything, but is not believed either.
#include "store/disk_fixture.h"
#include "store/fault_seed.h"

namespace mooncache::test {
namespace {

constexpr uint64_t kPerRound = 8, kRounds = 12, kLives = 3, kHistories = 3;
constexpr uint64_t kMostChanges = 160;  // more than one life makes

// DiskFaults*: with many seeds in `make soak`.
class DiskFaultsPowerCut : public DiskTest {
 protected:
  struct Story {
    std::map<uint64_t, std::vector<size_t>> sizes;  // that a block ever had; the last one is its present one
    std::set<uint64_t> removed;                     // for good, and not written again
    std::set<uint64_t> promised;                    // written before a sync that ended
    uint64_t next = 0;
  };
  void SetUp() override {
    DiskTest::SetUp();
    faulty_ = true;
  }
  DeviceOptions small() {
    auto with = options(4 * kMiB);
    with.segment_bytes = 256 << 10;
    with.stall_ms = 60'000;  // a busy machine is no stalled disk
    return with;
  }
  // Another content of the same key has another size.
  static size_t size_of(uint64_t number, size_t version) {
    return 12'000 + number * 7919 % 20'000 + version * 64;
  }
  void write_again(Story& story, uint64_t number) {
    auto& sizes = story.sizes[number];
    sizes.push_back(size_of(number, sizes.size()));
    story.removed.erase(number);
    memory_->offer(number, sizes.back());
    ASSERT_TRUE(memory_->wait_for([&] {
      const auto found = device_->find(kTenant, key_of(number));
      return found && found->size == sizes.back();
    }));
  }
  // Writes and removes until the power goes.
  void live(Story& story, std::mt19937_64& random, bool reads) {
    for (uint64_t round = 0; round < kRounds && !faults_->killed; ++round) {
      for (uint64_t i = 0; i < kPerRound; ++i, ++story.next) {
        story.sizes[story.next] = {size_of(story.next, 0)};
        memory_->offer(story.next, story.sizes[story.next].back());
      }
      ASSERT_TRUE(memory_->wait_all_written(story.next - kPerRound, kPerRound));
      for (int i = 0; reads && i < 4; ++i) look_at(story, random() % story.next, true);
      for (int i = 0; misreads_ && i < 4 && !faults_->killed; ++i) misread(story, random);
      std::set<uint64_t> synced;
      for (const auto& [number, sizes] : story.sizes) {
        if (memory_->was_written(number) && !story.removed.contains(number)) synced.insert(number);
      }
      const uint64_t victim = story.next - 1 - random() % std::min<uint64_t>(story.next, 100);
      story.promised.erase(victim);  // a removal that the power ends may last or not
      const bool was_here = remove(victim);
      if (faults_->killed) break;
      synced.erase(victim);
      if (was_here) story.promised.insert(synced.begin(), synced.end());
      story.removed.insert(victim);
      if (random() % 2 == 0) write_again(story, victim);
    }
    if (!faults_->killed && random() % 2 == 0) device_->close();
  }
  // Until the disk is opened again.
  void forget_lost(Story& story) {
    std::erase_if(story.promised,
                  [&](uint64_t number) { return memory_->reason_of_loss(number) == RemoveReason::kEvicted; });
  }
  // Reads that return something else: misses, of which some are put again, and most are removed.
  void misread(Story& story, std::mt19937_64& random) {
    const uint64_t number = random() % story.next;
    faults_->flipped_reads = true;
    const bool came = look_at(story, number, true);
    faults_->flipped_reads = false;
    EXPECT_FALSE(came) << number;
    if (random() % 3 == 0) {  // with the same content, and without waiting for the end of what lies there
      story.removed.erase(number);
      memory_->offer(number, story.sizes[number].back());
      ASSERT_TRUE(memory_->wait_for([&] { return device_->find(kTenant, key_of(number)).has_value(); }));
    }
    if (random() % 4 == 0) return;
    (void)remove(number);
    if (!faults_->killed) story.removed.insert(number);
  }
  // Of the block, whether it is there at all; with `any`, also a content that it had before.
  bool look_at(const Story& story, uint64_t number, bool any) {
    const auto bytes = fetched(number);
    if (bytes.empty()) return false;
    const auto& sizes = story.sizes.at(number);
    const bool is_known =
        any ? std::ranges::find(sizes, bytes.size()) != sizes.end() : bytes.size() == sizes.back();
    EXPECT_TRUE(is_known) << "a block of another time for " << number << ": " << bytes.size();
    EXPECT_EQ(bytes, content_of(number, bytes.size())) << "wrong bytes for " << number;
    return true;
  }
  void check(Story& story, bool keeps_promises, bool keeps_all) {
    faults_ = std::make_shared<Faults>();
    ASSERT_EQ(open(small()).message, "");
    for (const auto& [number, sizes] : story.sizes) {
      const bool came = look_at(story, number, !keeps_promises);
      if (!keeps_promises) continue;
      EXPECT_FALSE(came && story.removed.contains(number)) << "removed block " << number << " came back";
      if (came || !keeps_all || !story.promised.contains(number)) continue;
      EXPECT_EQ(memory_->reason_of_loss(number), RemoveReason::kEvicted) << number << " is lost";
      story.promised.erase(number);
    }
    EXPECT_EQ(memory_->open_reservations(), 0u);
  }
  bool misreads_ = false;
  void tell(uint64_t seed, bool syncs_nothing, bool reads) {
    std::filesystem::remove(file());
    std::mt19937_64 random(seed);
    Story story;
    for (uint64_t number = 0; number < kLives; ++number) {
      const auto cut_at = static_cast<int64_t>(random() % kMostChanges);
      SCOPED_TRACE("seed " + std::to_string(seed) + ", life " + std::to_string(number) +
                   ", power cut at change " + std::to_string(cut_at));
      faults_ = std::make_shared<Faults>();
      faults_->seed = random();
      faults_->is_volatile = true;
      faults_->power_cut_at = cut_at;
      ASSERT_EQ(open(small()).message, "");
      faults_->syncs_nothing = syncs_nothing;
      live(story, random, reads);
      device_.reset();
      forget_lost(story);
      check(story, !syncs_nothing, !reads);
      if (HasFailure()) return;
    }
  }
};

TEST_F(DiskFaultsPowerCut, WhatWasSyncedIsThereOrReportedAsLost) {
  for (uint64_t number = 0; number < kHistories; ++number)
    tell(fault_seed() * kHistories + number, false, false);
}

// Blocks that are read move on when their segment is given up. Until the next sync a power cut may take them.
TEST_F(DiskFaultsPowerCut, WhileBlocksMoveRemovedOnesStayRemoved) {
  for (uint64_t number = 0; number < kHistories; ++number)
    tell(fault_seed() * kHistories + number, false, true);
}

TEST_F(DiskFaultsPowerCut, WhatWasReadWronglyAndRemovedStaysRemoved) {
  misreads_ = true;
  for (uint64_t number = 0; number < kHistories; ++number)
    tell(fault_seed() * kHistories + number, false, true);
}

TEST_F(DiskFaultsPowerCut, ASyncThatDoesNothingGivesNoWrongBytes) {
  for (uint64_t number = 0; number < kHistories; ++number)
    tell(fault_seed() * kHistories + number, true, true);
}

}  // namespace
}  // namespace mooncache::test
