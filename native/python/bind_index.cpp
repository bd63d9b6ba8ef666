// Python: the block index.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <random>
#include <tuple>
#include <utility>
#include <vector>

#include "buffer_view.h"
#include "calls.h"
#include "index/index_benchmark.h"
#include "module.h"
#include "mooncache/block_index.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mooncache::python {
namespace {

// What was refused is the caller's mistake: ValueError, with the sentence of the Status.
[[noreturn]] void refuse(const Status& status) {
  throw nb::value_error(status.message.c_str());
}

template <typename T>
T& value_of(Result<T>& result) {
  if (!result) refuse(result.status());
  return *result;
}

uint64_t secret_seed() {
  std::random_device device;
  return uint64_t{device()} << 32 | device();
}

void init(BlockIndex* self, std::optional<uint64_t> hash_seed, uint64_t blocks_max) {
  new (self) BlockIndex({.hash_seed = hash_seed ? *hash_seed : secret_seed(), .blocks_max = blocks_max});
}

void apply(BlockIndex& self, uint32_t holder, nb::handle records) {
  const BufferView view(records);
  const Status status = without_gil([&] { return self.apply(holder, view.bytes()); });
  if (!status) refuse(status);
}

void begin_full(BlockIndex& self, uint32_t holder) {
  const Status status = without_gil([&] { return self.begin_full(holder); });
  if (!status) refuse(status);
}

uint64_t end_full(BlockIndex& self, uint32_t holder) {
  auto dropped = without_gil([&] { return self.end_full(holder); });
  return value_of(dropped);
}

uint64_t drop_holder(BlockIndex& self, uint32_t holder) {
  auto dropped = without_gil([&] { return self.drop_holder(holder); });
  return value_of(dropped);
}

nb::bytes locate(const BlockIndex& self, uint64_t tenant_id, nb::handle keys, uint32_t holders_max) {
  const BufferView view(keys);
  auto packed = without_gil([&] { return self.locate_packed(tenant_id, view.bytes(), holders_max); });
  return to_bytes(value_of(packed));
}

std::vector<std::pair<uint32_t, uint32_t>> match(const BlockIndex& self, uint64_t tenant_id,
                                                 nb::handle keys) {
  const BufferView view(keys);
  auto found = without_gil([&] { return self.match(tenant_id, view.bytes()); });
  std::vector<std::pair<uint32_t, uint32_t>> list;
  for (const HolderMatch& item : value_of(found).holders)
    list.emplace_back(item.holder, item.leading_blocks());
  return list;
}

using TierRuns = std::tuple<uint32_t, uint32_t, uint32_t, uint32_t, uint32_t>;

std::vector<TierRuns> match_tiers(const BlockIndex& self, uint64_t tenant_id, nb::handle keys) {
  const BufferView view(keys);
  auto found = without_gil([&] { return self.match(tenant_id, view.bytes()); });
  std::vector<TierRuns> list;
  for (const HolderMatch& item : value_of(found).holders) {
    const auto& runs = item.run_up_to_tier;
    list.emplace_back(item.holder, runs[0], runs[1], runs[2], runs[3]);
  }
  return list;
}

nb::bytes present(const BlockIndex& self, uint64_t tenant_id, nb::handle keys) {
  const BufferView view(keys);
  auto bitmap = without_gil([&] { return self.present(tenant_id, view.bytes()); });
  return to_bytes(value_of(bitmap));
}

using Usage = nb::typed<nb::dict, uint64_t, std::pair<uint64_t, uint64_t>>;
using IndexCounters = nb::typed<nb::dict, nb::str, uint64_t>;
using Figures = nb::typed<nb::dict, nb::str, double>;

template <typename Id>
Usage usage_dict(const std::vector<std::pair<Id, IndexUsage>>& list) {
  Usage out;
  for (const auto& [id, usage] : list) out[nb::int_(id)] = nb::make_tuple(usage.bytes, usage.blocks);
  return out;
}

IndexCounters stats(const BlockIndex& self) {
  const IndexStats stats = without_gil([&] { return self.stats(); });
  IndexCounters out;
  out["blocks"] = stats.blocks;
  out["replicas"] = stats.replicas;
  out["bytes"] = stats.bytes;
  out["memory_bytes"] = stats.memory_bytes;
  out["records_applied"] = stats.records_applied;
  out["popular_blocks"] = stats.popular_blocks;
  return out;
}

constexpr size_t kAuditRecordBytes = 52;

void put_number(std::byte*& to, uint64_t value, size_t bytes) {
  std::memcpy(to, &value, bytes);
  to += bytes;
}

using AuditAnswer = std::tuple<uint32_t, uint64_t, uint64_t, uint64_t, uint64_t, nb::bytes>;

AuditAnswer audit(const BlockIndex& self, std::vector<std::pair<uint64_t, uint32_t>> wanted,
                  uint32_t wanted_of_others, std::vector<uint16_t> domains, uint32_t domain_count,
                  uint32_t start, uint32_t entries_max, uint32_t found_max) {
  std::sort(wanted.begin(), wanted.end());
  const IndexAudit what{std::move(wanted), wanted_of_others, std::move(domains), domain_count};
  const AuditPage page = without_gil([&] { return self.audit(what, start, entries_max, found_max); });
  std::vector<std::byte> packed(page.found.size() * kAuditRecordBytes);
  std::byte* at = packed.data();
  for (const AuditedBlock& block : page.found) {
    put_number(at, block.tenant, 8);
    at = std::copy(block.key.bytes.begin(), block.key.bytes.end(), at);
    put_number(at, block.size_bytes, 8);
    put_number(at, block.copies, 2);
    put_number(at, static_cast<uint64_t>(block.tier), 1);
    put_number(at, block.close ? 1 : 0, 1);
  }
  return {page.next,         page.short_blocks, page.missing_bytes,
          page.close_blocks, page.close_bytes,  to_bytes(packed)};
}

Figures py_index_benchmark(uint64_t blocks, uint64_t holders, uint64_t operations) {
  auto result = without_gil(
      [&] { return index_benchmark({.blocks = blocks, .holders = holders, .operations = operations}); });
  const IndexBenchmark& values = value_of(result);
  Figures out;
  out["blocks"] = static_cast<double>(values.blocks);
  out["replicas"] = static_cast<double>(values.replicas);
  out["operations"] = static_cast<double>(values.operations);
  out["build_per_s"] = values.build_per_s;
  out["apply_per_s"] = values.apply_per_s;
  out["locate_per_s"] = values.locate_per_s;
  out["match_per_s"] = values.match_per_s;
  out["bytes_per_block"] = values.bytes_per_block;
  out["longest_apply_us"] = values.longest_apply_us;
  return out;
}

}  // namespace

void bind_index(nb::module_& m) {
  nb::class_<BlockIndex>(
      m, "BlockIndex",
      "Which holder has which block. Thread-safe; every method releases the GIL around its work.")
      .def("__init__", &init, "hash_seed"_a = nb::none(), "blocks_max"_a = uint64_t{1} << 31,
           "hash_seed: 64 bits, random unless given. blocks_max: records beyond it are refused.")
      .def("apply", &apply, "holder"_a, "records"_a,
           "Applies packed 56-byte block records of one holder (below 65535). ValueError, with nothing "
           "applied, "
           "for a cut or unknown record or a full index.")
      .def("begin_full", &begin_full, "holder"_a, "Begins, or begins again, a full report of a holder.")
      .def("end_full", &end_full, "holder"_a,
           "Ends a full report: drops the blocks it did not mention and returns how many. ValueError without "
           "begin_full.")
      .def("drop_holder", &drop_holder, "holder"_a, "Forgets all blocks of a holder and returns how many.")
      .def("locate", &locate, "tenant_id"_a, "keys"_a, "holders_max"_a = kIndexHoldersMax,
           "keys: n * 32 bytes. For each key u16 count, then count times u16 holder, u8 tier, u8 0, u64 "
           "size_bytes "
           "(little endian). ValueError when keys are cut.")
      .def("match", &match, "tenant_id"_a, "keys"_a,
           "(holder, leading blocks) of every holder of the first key, longest first.")
      .def(
          "match_tiers", &match_tiers, "tenant_id"_a, "keys"_a,
          "(holder, leading blocks in HBM, in DRAM or faster, in SSD or faster, in any tier), longest first.")
      .def("present", &present, "tenant_id"_a, "keys"_a,
           "Bitmap: bit i % 8 of byte i // 8 when anyone holds key i.")
      .def("audit", &audit, "wanted"_a, "wanted_of_others"_a, "domains"_a, "domain_count"_a, "start"_a,
           "entries_max"_a, "found_max"_a,
           "Blocks with fewer copies than wanted ((tenant_id, copies), those of others), or with enough "
           "copies in "
           "too few "
           "domains (one number for each holder; 65535: its copies do not count). (next start or 0, short "
           "blocks, "
           "missing "
           "bytes, close blocks, close bytes, records of 52 bytes: u64 tenant, key, u64 size, u16 copies, u8 "
           "fastest tier, "
           "u8 close).")
      .def(
          "tenant_usage",
          [](const BlockIndex& self) { return usage_dict(without_gil([&] { return self.tenant_usage(); })); },
          "tenant_id -> (bytes of all replicas, distinct blocks).")
      .def(
          "holder_usage",
          [](const BlockIndex& self) { return usage_dict(without_gil([&] { return self.holder_usage(); })); },
          "holder -> (bytes, blocks).")
      .def("stats", &stats, "blocks, replicas, bytes, memory_bytes, records_applied, popular_blocks.")
      .def(
          "memory_bytes",
          [](const BlockIndex& self) { return without_gil([&] { return self.memory_bytes(); }); },
          "Memory that the index itself takes.")
      .def(
          "check", [](const BlockIndex& self) { return without_gil([&] { return self.check(); }); },
          "Verifies every invariant: \"\" or what is wrong. Linear in the index.");
  m.def("index_benchmark", &py_index_benchmark, "blocks"_a, "holders"_a, "operations"_a = 4'000'000,
        "Block operations per second of one core for apply, locate and match, with `blocks` blocks on "
        "`holders` "
        "holders, and bytes of index per block. ValueError for zeros or sizes beyond the limits.");
}

}  // namespace mooncache::python
