// Changes to the index: records, full reports, removal of a holder.
#include <cstring>

#include "index/block_index_impl.h"

namespace mooncache {
namespace {

// Blocks changed or scanned in one turn under the exclusive lock: tens of microseconds to a millisecond.
constexpr size_t kApplyTurn = 1024;
constexpr uint32_t kSweepTurn = 32 << 10;

Status holder_status(uint32_t holder) {
  if (holder < kIndexHoldersMax) return Status::ok();
  return {Code::kInvalidArgument, "holder must be below 65535"};
}

}  // namespace

BlockIndex::Impl::Impl(BlockIndexOptions options_in)
    : options{options_in.hash_seed, std::min<uint64_t>(options_in.blocks_max, index::kNoEntry - 1)} {}

BlockIndex::BlockIndex(BlockIndexOptions options) : impl_(std::make_unique<Impl>(options)) {}
BlockIndex::~BlockIndex() = default;

BlockIndex::Impl::Record BlockIndex::Impl::decode(const std::byte* bytes) {
  Record record;
  record.kind = static_cast<uint8_t>(bytes[0]);
  record.tier = static_cast<uint8_t>(bytes[1]);
  std::memcpy(&record.tenant, bytes + 8, sizeof record.tenant);
  std::memcpy(&record.size_bytes, bytes + 16, sizeof record.size_bytes);
  std::memcpy(record.key.bytes.data(), bytes + 24, kKeyBytes);
  return record;
}

Status BlockIndex::Impl::validate(uint32_t holder, std::span<const std::byte> records) const {
  if (Status status = holder_status(holder); !status) return status;
  if (records.size() % kIndexRecordBytes != 0) {
    return {Code::kInvalidArgument, "records must be whole: their length is not a multiple of 56 bytes"};
  }
  const size_t count = records.size() / kIndexRecordBytes;
  if (count > kIndexApplyRecordsMax) return {Code::kLimitExceeded, "at most 1,048,576 records in one call"};
  uint64_t added = 0;
  for (size_t i = 0; i < count; ++i) {
    const Record record = decode(records.data() + i * kIndexRecordBytes);
    if (record.kind < kRecordAdd || record.kind > kRecordMove) {
      return {Code::kInvalidArgument, "record " + std::to_string(i) + " has an unknown kind"};
    }
    if (record.tier >= kIndexTiers) {
      return {Code::kInvalidArgument, "record " + std::to_string(i) + " has an unknown tier"};
    }
    if (record.kind == kRecordRemove) continue;
    if (record.size_bytes > kIndexBlockBytesMax) {
      return {Code::kTooLarge, "record " + std::to_string(i) + " has a block above 2^40 - 1 bytes"};
    }
    ++added;
  }
  if (added > options.blocks_max || table.size() > options.blocks_max - added) {
    return {Code::kLimitExceeded, "the index is full: raise blocks_max"};
  }
  return Status::ok();
}

IndexUsage& BlockIndex::Impl::usage_of(TenantId tenant) {
  if (last_usage == nullptr || last_tenant != tenant) {
    last_usage = &tenants[tenant];  // nodes of the map do not move
    last_tenant = tenant;
  }
  return *last_usage;
}

void BlockIndex::Impl::put_replica(uint32_t holder, const Record& record, uint64_t hash_value) {
  Holder& state = holders[holder];
  IndexUsage& usage = usage_of(record.tenant);
  const Packed wanted = Packed::make(holder, record.tier, record.size_bytes, state.epoch);
  uint32_t number = find(hash_value, record.tenant, record.key);
  if (number == index::kNoEntry) {
    number = pool.allocate();
    pool[number] = IndexEntry{record.key, record.tenant, {}};
    table.insert(hash_value, number);
    ++usage.blocks;
  }
  IndexEntry& entry = pool[number];
  uint64_t old_bytes = 0;
  if (Packed* replica = pool.find(entry, holder); replica != nullptr) {
    if (state.full_open && replica->epoch() != state.epoch) ++state.marked;
    old_bytes = replica->size_bytes();
    *replica = wanted;
  } else {
    pool.add(entry, wanted);
    if (state.full_open) ++state.marked;
    ++state.usage.blocks;
    ++replicas;
  }
  // unsigned arithmetic: the difference may be negative, the sums are not
  const uint64_t change = record.size_bytes - old_bytes;
  state.usage.bytes += change;
  usage.bytes += change;
  bytes += change;
}

void BlockIndex::Impl::remove_replica(uint32_t number, Packed* replica) {
  IndexEntry& entry = pool[number];
  Holder& state = holders[replica->holder()];
  IndexUsage& usage = usage_of(entry.tenant);
  if (state.full_open && replica->epoch() == state.epoch) --state.marked;
  --state.usage.blocks;
  --replicas;
  state.usage.bytes -= replica->size_bytes();
  usage.bytes -= replica->size_bytes();
  bytes -= replica->size_bytes();
  pool.remove(entry, replica);
  if (entry.replicas[0].used()) return;
  --usage.blocks;
  if (usage.blocks == 0) {
    tenants.erase(entry.tenant);
    last_usage = nullptr;
  }
  table.erase(hash(entry.tenant, entry.key), number);
  pool.release(number);
}

void BlockIndex::Impl::apply_group(uint32_t holder, const std::byte* bytes_in, size_t count) {
  std::array<Record, kGroup> group;
  std::array<uint64_t, kGroup> hashes;
  for (size_t i = 0; i < count; ++i) {
    group[i] = decode(bytes_in + i * kIndexRecordBytes);
    hashes[i] = hash(group[i].tenant, group[i].key);
    table.prefetch(hashes[i]);
  }
  for (size_t i = 0; i < count; ++i) {
    const uint32_t number = table.candidate(hashes[i]);
    if (number != index::kNoEntry) __builtin_prefetch(&pool[number], 1);
  }
  for (size_t i = 0; i < count; ++i) {
    if (group[i].kind != kRecordRemove) {
      put_replica(holder, group[i], hashes[i]);
      continue;
    }
    const uint32_t number = find(hashes[i], group[i].tenant, group[i].key);
    if (number == index::kNoEntry) continue;
    if (Packed* replica = pool.find(pool[number], holder); replica != nullptr)
      remove_replica(number, replica);
  }
}

Status BlockIndex::apply(uint32_t holder, std::span<const std::byte> records) {
  Impl& impl = *impl_;
  const std::lock_guard turn(impl.writers);
  if (Status status = impl.validate(holder, records); !status) return status;
  constexpr size_t kTurnBytes = kApplyTurn * kIndexRecordBytes;
  while (!records.empty()) {
    const auto part = records.first(std::min(records.size(), kTurnBytes));
    records = records.subspan(part.size());
    const size_t count = part.size() / kIndexRecordBytes;
    const auto lock = impl.write();
    if (impl.holders.size() <= holder) impl.holders.resize(holder + 1);
    for (size_t at = 0; at < count; at += Impl::kGroup) {
      impl.apply_group(holder, part.data() + at * kIndexRecordBytes, std::min(Impl::kGroup, count - at));
    }
    impl.records_applied += count;
  }
  return Status::ok();
}

template <typename Visit>
void BlockIndex::Impl::sweep(uint32_t holder, uint64_t limit, Visit visit) {
  uint64_t seen = 0;
  for (uint32_t start = 0; seen < limit; start += kSweepTurn) {
    const auto lock = write();
    if (start >= pool.high_water()) return;
    const uint32_t end = start + std::min(kSweepTurn, pool.high_water() - start);
    for (uint32_t number = start; number < end && seen < limit; ++number) {
      IndexEntry& entry = pool[number];
      Packed* replica = pool.find(entry, holder);
      if (replica != nullptr && visit(number, replica)) ++seen;
    }
  }
}

Status BlockIndex::begin_full(uint32_t holder) {
  Impl& impl = *impl_;
  if (Status status = holder_status(holder); !status) return status;
  const std::lock_guard turn(impl.writers);
  {
    const auto lock = impl.write();
    if (impl.holders.size() <= holder) impl.holders.resize(holder + 1);
    Impl::Holder& state = impl.holders[holder];
    if (!state.full_open) {
      state.full_open = true;
      state.marked = 0;
      state.epoch = !state.epoch;
      return Status::ok();
    }
  }
  // A report was cut off: take its marks back.
  const bool epoch = impl.holders[holder].epoch;
  impl.sweep(holder, impl.holders[holder].marked, [&](uint32_t, Impl::Packed* replica) {
    if (replica->epoch() != epoch) return false;
    replica->bits ^= Impl::Packed::kEpoch;
    --impl.holders[holder].marked;
    return true;
  });
  return Status::ok();
}

Result<uint64_t> BlockIndex::end_full(uint32_t holder) {
  Impl& impl = *impl_;
  const std::lock_guard turn(impl.writers);
  if (holder >= impl.holders.size() || !impl.holders[holder].full_open) {
    return {Code::kInvalidArgument, "end_full without begin_full for this holder"};
  }
  const Impl::Holder& state = impl.holders[holder];
  const bool epoch = state.epoch;
  const uint64_t stale = state.usage.blocks - state.marked;
  impl.sweep(holder, stale, [&](uint32_t number, Impl::Packed* replica) {
    if (replica->epoch() == epoch) return false;
    impl.remove_replica(number, replica);
    return true;
  });
  const auto lock = impl.write();
  impl.holders[holder].full_open = false;
  impl.holders[holder].marked = 0;
  return stale;
}

Result<uint64_t> BlockIndex::drop_holder(uint32_t holder) {
  Impl& impl = *impl_;
  if (Status status = holder_status(holder); !status) return status;
  const std::lock_guard turn(impl.writers);
  if (holder >= impl.holders.size()) return uint64_t{0};
  const uint64_t blocks = impl.holders[holder].usage.blocks;
  impl.sweep(holder, blocks, [&](uint32_t number, Impl::Packed* replica) {
    impl.remove_replica(number, replica);
    return true;
  });
  const auto lock = impl.write();
  impl.holders[holder] = {};
  return blocks;
}

}  // namespace mooncache
