// The store's policy "mooncache" alone, and a store without network or clock, so that both are held against
// the simulator.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "buffer_view.h"
#include "module.h"
#include "mooncache/store.h"
#include "store/disk/model.h"
#include "store/reuse.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mooncache::python {
namespace {

using store::Reuse;
using store::disk::DeviceModel;

void seen(Reuse& policy, const std::vector<uint64_t>& blocks, double now_s, nb::handle here) {
  const BufferView view(here);
  const auto bytes = view.bytes();
  std::vector<uint8_t> bitmap;
  for (const std::byte byte : bytes) bitmap.push_back(static_cast<uint8_t>(byte));
  policy.seen(blocks, now_s, bitmap);
}

nb::object victim(Reuse& policy, double now_s, std::optional<uint64_t> incoming) {
  const auto found = policy.victim(now_s, incoming);
  if (!found) return nb::none();
  return nb::make_tuple(found->id, found->worth);
}

// Requests of one client on a real store without network or clock: match, then put what is missing.
std::vector<uint32_t> replay_chains(const std::string& eviction, uint64_t capacity_blocks,
                                    const std::vector<std::vector<uint64_t>>& chains,
                                    const std::vector<uint64_t>& times_ms) {
  if (times_ms.size() != chains.size()) throw nb::value_error("times_ms must have one time for each chain");
  const nb::gil_scoped_release release;
  StoreConfig config;
  config.eviction = eviction;
  config.shards = 1;  // slots of one shard suffice for any keys
  config.quantum_bytes = 64;
  config.expected_block_bytes = 64;
  config.capacity_bytes = capacity_blocks * config.quantum_bytes;
  config.event_log_capacity = 16;
  auto store = Store::open(config);
  if (!store) {
    const nb::gil_scoped_acquire acquire;
    throw nb::value_error(store.status().message.c_str());
  }
  std::vector<uint32_t> hits;
  std::vector<Key> keys;
  for (size_t request = 0; request < chains.size(); ++request) {
    keys.assign(chains[request].size(), Key{});
    for (size_t at = 0; at < keys.size(); ++at)
      std::memcpy(keys[at].bytes.data(), &chains[request][at], sizeof(uint64_t));
    const MatchResult match = (*store)->match(0, keys, true, times_ms[request]);
    hits.push_back(match.leading_run);
    for (size_t at = 0; at < keys.size(); ++at) {
      if (((match.bitmap[at / 8] >> (at % 8)) & 1) != 0) continue;
      const auto place = (*store)->reserve(0, keys[at], config.quantum_bytes, times_ms[request]);
      if (place) (void)(*store)->commit(place->id, 0, times_ms[request]);
    }
  }
  return hits;
}

std::vector<std::pair<uint64_t, double>> next_victims(const Reuse& policy, double now_s, uint32_t limit) {
  std::vector<Reuse::NextVictim> next;
  policy.next_victims(now_s, limit, next);
  std::vector<std::pair<uint64_t, double>> pairs;
  for (const auto& [id, chance] : next) pairs.emplace_back(id, chance);
  return pairs;
}

std::vector<uint64_t> offer(DeviceModel& disk, uint64_t block, uint32_t hits, double chance, double now_s) {
  std::vector<uint64_t> lost;
  disk.offer(block, hits, chance, now_s, lost);
  return lost;
}

nb::dict counts(const DeviceModel& disk) {
  const DeviceModel::Counts& seen = disk.counts();
  nb::dict named;
  named["written_bytes"] = seen.written_bytes;
  named["admitted_blocks"] = seen.admitted;
  named["refused_blocks"] = seen.refused;
  named["dropped_blocks"] = seen.dropped;
  named["kept_blocks"] = seen.kept;
  named["reclaimed_blocks"] = seen.reclaimed;
  return named;
}

void bind_disk(nb::module_& m) {
  nb::class_<DeviceModel>(m, "DiskModel",
                          "Which blocks a store node's disk would have, without a disk: the same decisions.")
      .def(
          "__init__",
          [](DeviceModel* self, uint64_t capacity_bytes, uint64_t block_bytes, uint64_t write_bytes_per_s,
             uint64_t seed) {
            if (block_bytes == 0) throw nb::value_error("block_bytes must be at least 1");
            new (self) DeviceModel({capacity_bytes, block_bytes, write_bytes_per_s, seed});
          },
          "capacity_bytes"_a, "block_bytes"_a, "write_bytes_per_s"_a = 0, "seed"_a = 1)
      .def("offer", &offer, "block"_a, "hits"_a, "chance"_a, "now_s"_a,
           "Memory evicts the block. Returns the blocks that the disk gives up for it.")
      .def("touch", &DeviceModel::touch, "block"_a, "It was asked for.")
      .def("discard", &DeviceModel::discard, "block"_a)
      .def("counts", &counts)
      .def("__contains__", &DeviceModel::contains, "block"_a)
      .def("__len__", &DeviceModel::blocks);
}

std::string check(const Reuse& policy) {
  std::string why;
  return policy.check(&why) ? std::string() : why;
}

}  // namespace

void bind_reuse(nb::module_& m) {
  bind_disk(m);
  m.def(
      "replay_chains", &replay_chains, "eviction"_a, "capacity_blocks"_a, "chains"_a, "times_ms"_a,
      "Leading blocks found of each chain by a store with the policy: each chain is asked for, then what is "
      "missing is put. ValueError for a policy or capacity that the store refuses.");
  nb::class_<Reuse>(m, "Reuse",
                    "The store nodes' eviction policy \"mooncache\", for tests: one thread, ids for blocks.")
      .def(
          "__init__",
          [](Reuse* self, uint32_t chains_max, uint64_t start_uses) {
            if (chains_max == 0) throw nb::value_error("chains_max must be at least 1");
            new (self) Reuse({chains_max, start_uses});
          },
          "chains_max"_a = store::ReuseLimits{}.chains_max, "start_uses"_a = store::ReuseLimits{}.start_uses)
      .def("seen", &seen, "blocks"_a, "now_s"_a, "here"_a = nb::bytes("", 0),
           "A chain was asked for. Bit at % 8 of byte at / 8 of here: blocks[at] is stored.")
      .def("stored", &Reuse::stored, "block"_a, "now_s"_a)
      .def("discard", &Reuse::discard, "block"_a)
      .def("set_aside", &Reuse::set_aside, "block"_a)
      .def("victim", &victim, "now_s"_a, "incoming"_a = nb::none(),
           nb::sig("def victim(self, now_s: float, incoming: int | None = None) -> tuple[int, float] | None"),
           "(block, worth) of what should go next, None when no block is known.")
      .def("next_victims", &next_victims, "now_s"_a, "limit"_a,
           "(block, chance of another use) of what would go next, the first one first.")
      .def("__contains__", &Reuse::knows, "block"_a)
      .def("__len__", &Reuse::blocks)
      .def_prop_ro("chains", &Reuse::chains)
      .def_prop_ro("memory_bytes", &Reuse::memory_bytes)
      .def("check", &check, "Empty when every invariant holds, else the first broken one.");
}

}  // namespace mooncache::python
