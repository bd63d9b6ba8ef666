// Random histories against a plain model. The model does not predict victims: it learns evictions from the
// event log and checks that each was legal, that contents are right and that every refusal has its cause.
#include "store/store_fixture.h"

namespace mooncache::test {
namespace {

class Model {
 public:
  Model(uint64_t seed, const std::string& eviction) : random_(seed) {
    StoreConfig config = small_config(32 * 1024);
    config.eviction = eviction;
    config.arena_bytes = seed % 3 == 0 ? 16 * 1024 : 0;
    config.correlated_ms = seed % 2 == 0 ? 50 : 0;
    config.shards = seed % 2 == 0 ? 1 : 8;
    store_ = open_store(config);
  }

  void run(int steps) {
    for (int step = 0; step < steps && !::testing::Test::HasFailure(); ++step) {
      now_ms_ += random_() % 20;
      one_step();
      learn_events();
      if (step % 5 == 0) {
        EXPECT_SOUND(*store_);
      }
    }
    for (const auto& hold : holds_) store_->release(hold.id);
    for (const auto& hold : reservations_) store_->abort(hold.id);
    EXPECT_SOUND(*store_);
    const StoreStats stats = store_->stats();
    EXPECT_EQ(stats.pins + stats.reservations + stats.zombie_blocks, 0u);
    EXPECT_EQ(stats.blocks, blocks_.size());
  }

 private:
  struct Block {
    uint64_t seed;
    uint64_t size;
    uint32_t live_pins = 0;
    uint64_t retained_until_ms = 0;
  };
  struct Held {
    ReservationId id;
    TenantId tenant;
    uint64_t number, size, seed;
  };
  struct Hold {
    PinId id;
    uint64_t seed;
    std::pair<TenantId, Key> name;
    uint64_t life;
  };
  using Name = std::pair<TenantId, Key>;

  TenantId tenant() { return 1 + random_() % 3; }
  uint64_t number() { return random_() % 120; }

  void learn_events() {
    const EventBatch batch = store_->drain_events(1000);
    EXPECT_FALSE(batch.overflow);
    for (size_t at = 0; at < batch.records.size(); at += kBlockRecordBytes) {
      Reader reader({batch.records.data() + at, kBlockRecordBytes});
      const auto kind = static_cast<RecordKind>(reader.u8());
      reader.u8();
      const auto reason = static_cast<RemoveReason>(reader.u8());
      reader.take(5);
      const TenantId tenant = reader.u64();
      reader.u64();
      const Name name{tenant, reader.key()};
      if (kind != RecordKind::kRemove || reason != RemoveReason::kEvicted) continue;
      const auto block = blocks_.find(name);
      ASSERT_NE(block, blocks_.end()) << "evicted what was not there";
      EXPECT_EQ(block->second.live_pins, 0u) << "evicted under a pin";
      EXPECT_LE(block->second.retained_until_ms, now_ms_) << "evicted under a retention pin";
      blocks_.erase(block);
    }
  }

  void reserve() {
    const TenantId who = tenant();
    const uint64_t what = number(), size = 1 + random_() % (random_() % 8 == 0 ? 9000 : 1200);
    const auto got = store_->reserve(who, key_of(what), size, now_ms_);
    learn_events();
    const bool exists = blocks_.contains({who, key_of(what)});
    if (got) {
      EXPECT_FALSE(exists);
      const uint64_t seed = ++seeds_;
      fill(store_->writable(got->id), seed);
      reservations_.push_back({got->id, who, what, size, seed});
    } else if (got.code() == Code::kAlreadyExists) {
      EXPECT_TRUE(exists);
    } else {
      EXPECT_TRUE(got.code() == Code::kNoSpace || got.code() == Code::kQuotaExceeded)
          << code_name(got.code());
    }
  }

  void end_reservation() {
    if (reservations_.empty()) return;
    const size_t at = random_() % reservations_.size();
    const Held held = reservations_[at];
    reservations_.erase(reservations_.begin() + static_cast<ptrdiff_t>(at));
    const Slice slice = store_->writable(held.id);
    ASSERT_TRUE(holds({slice.data, slice.size}, held.seed)) << "someone wrote into a reservation";
    const uint32_t crc = crc32c({slice.data, slice.size});
    const Name name{held.tenant, key_of(held.number)};
    const Code expected = blocks_.contains(name) ? Code::kAlreadyExists : Code::kOk;
    switch (random_() % 5) {
      case 0:
        store_->abort(held.id);
        EXPECT_EQ(store_->commit(held.id, crc, now_ms_).code, Code::kReservationUnknown);
        return;
      case 1: {
        const uint64_t cut = random_() % held.size;
        if (cut < held.size)
          (void)store_->note_written(held.id, cut, held.size - cut,
                                     crc32c({slice.data + cut, held.size - cut}));
        if (cut > 0 && random_() % 4 == 0) {
          EXPECT_EQ(store_->commit_written(held.id, crc, now_ms_).code, Code::kIncomplete);
          return;
        }
        if (cut > 0 && !store_->note_written(held.id, 0, cut, crc32c({slice.data, cut}))) ADD_FAILURE();
        EXPECT_EQ(store_->commit_written(held.id, crc, now_ms_).code, expected);
        break;
      }
      default:
        EXPECT_EQ(store_->commit(held.id, crc, now_ms_).code, expected);
    }
    if (expected == Code::kOk) blocks_[name] = {held.seed, held.size};
  }

  void acquire() {
    const Name name{tenant(), key_of(number())};
    const auto got = store_->acquire(name.first, name.second, now_ms_);
    const auto block = blocks_.find(name);
    ASSERT_EQ(got.is_ok(), block != blocks_.end());
    if (!got) return;
    ++block->second.live_pins;
    EXPECT_EQ(got->info.pins, block->second.live_pins);
    const ConstSlice bytes = store_->readable(got->id);
    EXPECT_EQ(bytes.size, block->second.size);
    EXPECT_EQ(crc32c({bytes.data, bytes.size}), got->info.crc32c);
    holds_.push_back({got->id, block->second.seed, name, block->second.seed});
  }

  void release(bool corrupt) {
    if (holds_.empty()) return;
    const size_t at = random_() % holds_.size();
    const Hold hold = holds_[at];
    EXPECT_TRUE(holds(store_->readable(hold.id), hold.seed)) << "pinned bytes changed";
    const auto block = blocks_.find(hold.name);
    const bool same = block != blocks_.end() && block->second.seed == hold.seed;
    if (corrupt) {
      store_->quarantine(hold.id);
      if (same) blocks_.erase(block);
      return;
    }
    holds_.erase(holds_.begin() + static_cast<ptrdiff_t>(at));
    store_->release(hold.id);
    EXPECT_EQ(store_->readable(hold.id).data, nullptr);
    if (same) --block->second.live_pins;
  }

  void retention() {
    const Name name{tenant(), key_of(number())};
    const auto block = blocks_.find(name);
    const bool unpin = random_() % 3 == 0;
    const uint64_t ttl = 1 + random_() % 300;
    const Code code =
        unpin ? store_->unpin(name.first, name.second) : store_->pin(name.first, name.second, ttl, now_ms_);
    ASSERT_EQ(code, block == blocks_.end() ? Code::kNotFound : Code::kOk);
    if (block != blocks_.end()) block->second.retained_until_ms = unpin ? 0 : now_ms_ + ttl;
  }

  void remove() {
    const Name name{tenant(), key_of(number())};
    const bool force = random_() % 2 == 0;
    const auto block = blocks_.find(name);
    const Code code = store_->remove(name.first, name.second, RemoveReason::kRemoved, now_ms_, force);
    if (block == blocks_.end()) {
      EXPECT_EQ(code, Code::kNotFound);
    } else if (!force && block->second.retained_until_ms > now_ms_) {
      EXPECT_EQ(code, Code::kPinned);
    } else {
      EXPECT_EQ(code, Code::kOk);
      blocks_.erase(block);
    }
  }

  void match() {
    std::vector<Key> keys;
    const TenantId who = tenant();
    for (uint64_t at = 0; at < 10; ++at) keys.push_back(key_of(number()));
    const MatchResult result = store_->match(who, keys, random_() % 2 == 0, now_ms_);
    uint32_t run = 0;
    while (run < keys.size() && blocks_.contains({who, keys[run]})) ++run;
    EXPECT_EQ(result.leading_run, run);
    for (size_t at = 0; at < keys.size(); ++at) {
      EXPECT_EQ(((result.bitmap[at / 8] >> (at % 8)) & 1) != 0, blocks_.contains({who, keys[at]}));
    }
  }

  void one_step() {
    switch (random_() % 16) {
      case 0:
      case 1:
      case 2:
      case 3:
        if (reservations_.size() < 6) {
          reserve();
          break;
        }
        [[fallthrough]];
      case 4:
      case 5:
      case 6:
        end_reservation();
        break;
      case 7:
      case 8:
        if (holds_.size() < 12) {
          acquire();
          break;
        }
        [[fallthrough]];
      case 9:
      case 10:
        release(false);
        break;
      case 11:
        retention();
        break;
      case 12:
        remove();
        break;
      case 13:
        match();
        break;
      case 14:
        if (random_() % 10 == 0) release(true);
        break;
      default:
        if (random_() % 10 == 0)
          store_->set_limits(tenant(), {.memory = {random_() % 3 == 0 ? 0 : 4000 + random_() % 16000,
                                                   random_() % 3 == 0 ? 0 : random_() % 8000}});
    }
  }

  std::mt19937_64 random_;
  std::unique_ptr<Store> store_;
  uint64_t now_ms_ = 1000;
  uint64_t seeds_ = 0;
  std::map<Name, Block> blocks_;
  std::vector<Held> reservations_;
  std::vector<Hold> holds_;
};

TEST(StoreModel, RandomHistoriesAgree) {
  for (uint64_t seed = 1; seed <= 40 && !HasFailure(); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const char* const policies[] = {"lru", "2q", "mooncache"};
    Model(seed, policies[seed % 3]).run(3000);
  }
}

}  // namespace
}  // namespace mooncache::test
