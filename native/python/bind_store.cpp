// StoreServer for Python: the store node's data plane, driven by the service. Every call that can take a lock
// of the store or wait for the loops releases the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>
#include <string.h>

#include <cmath>
#include <cstring>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "buffer_view.h"
#include "calls.h"
#include "module.h"
#include "mooncache/server.h"
#include "object_queue.h"
#include "packed_keys.h"
#include "rdma_arguments.h"
#include "store/device_memory.h"
#include "store/disk/benchmark.h"
#include "store/growth_benchmark.h"
#include "store_server.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mooncache::python {
namespace {

template <typename T>
void set_number(const char* name, nb::handle value, T& out) {
  if (!nb::try_cast<T>(value, out)) {
    throw nb::value_error((std::string(name) + " must be a number that fits its range").c_str());
  }
}

void set_text(const char* name, nb::handle value, std::string& out) {
  if (!nb::isinstance<nb::str>(value)) throw nb::value_error((std::string(name) + " must be a str").c_str());
  out = nb::cast<std::string>(value);
}

void set_secret(nb::handle value, ServerConfig& config) {
  const BufferView view(value);
  if (view.size() != config.secret.size()) throw nb::value_error("secret must be 32 bytes");
  std::memcpy(config.secret.data(), view.bytes().data(), config.secret.size());
}

// True when `name` is a field of `fields` that was set.
bool set_server_field(const std::string& name, nb::handle value, ServerConfig& config) {
#define MOONCACHE_TEXT(field) \
  if (name == #field) return set_text(#field, value, config.field), true;
#define MOONCACHE_NUMBER(field) \
  if (name == #field) return set_number(#field, value, config.field), true;
  MOONCACHE_TEXT(node_id)
  MOONCACHE_TEXT(host_id)
  MOONCACHE_TEXT(tcp_host)
  MOONCACHE_TEXT(unix_path)
  MOONCACHE_TEXT(tls_cert)
  MOONCACHE_TEXT(tls_key)
  MOONCACHE_TEXT(tls_client_ca)
  MOONCACHE_NUMBER(incarnation)
  MOONCACHE_NUMBER(tcp_port)
  MOONCACHE_NUMBER(io_threads)
  MOONCACHE_NUMBER(max_connections)
  MOONCACHE_NUMBER(max_unauthenticated)
  MOONCACHE_NUMBER(handshake_timeout_ms)
  MOONCACHE_NUMBER(idle_timeout_ms)
  MOONCACHE_NUMBER(grant_timeout_ms)
  MOONCACHE_NUMBER(peer_timeout_ms)
  MOONCACHE_NUMBER(frame_timeout_ms)
  MOONCACHE_NUMBER(progress_timeout_ms)
  MOONCACHE_NUMBER(min_progress_bytes)
  MOONCACHE_NUMBER(max_wait_ms)
  MOONCACHE_NUMBER(max_pins_per_connection)
  MOONCACHE_NUMBER(max_reservations_per_connection)
  MOONCACHE_NUMBER(max_reserved_bytes_per_connection)
  MOONCACHE_NUMBER(max_queued_bytes_per_connection)
  MOONCACHE_NUMBER(max_tenants)
  MOONCACHE_NUMBER(socket_buffer_bytes)
  MOONCACHE_NUMBER(log_capacity)
#undef MOONCACHE_TEXT
#undef MOONCACHE_NUMBER
  return false;
}

std::vector<DiskKey> disk_keys_of(const std::vector<nb::bytes>& keys) {
  std::vector<DiskKey> raw(keys.size());
  for (size_t at = 0; at < keys.size(); ++at) {
    if (keys[at].size() != raw[at].size()) throw nb::value_error("a key has 32 bytes");
    std::memcpy(raw[at].data(), keys[at].c_str(), raw[at].size());
  }
  return raw;
}

// By tenant id.
void set_disk_keys(nb::handle value, std::vector<std::pair<TenantId, std::vector<DiskKey>>>& out) {
  std::map<TenantId, std::vector<nb::bytes>> keys;
  if (!nb::try_cast(value, keys)) throw nb::value_error("disk_keys must be a dict of tenant ids and keys");
  for (const auto& [tenant, some] : keys) out.emplace_back(tenant, disk_keys_of(some));
}

// The GPU in whose memory the arena lies; -1: it does not.
struct ArenaGpu {
  int ordinal = -1;
  std::string driver;  // "" = the system's
};

bool set_arena_gpu(const std::string& name, nb::handle value, ArenaGpu& gpu) {
  if (name == "arena_gpu") return set_number("arena_gpu", value, gpu.ordinal), true;
  if (name == "arena_gpu_driver") return set_text("arena_gpu_driver", value, gpu.driver), true;
  return false;
}

bool set_store_field(const std::string& name, nb::handle value, StoreConfig& config) {
#define MOONCACHE_NUMBER(field) \
  if (name == #field) return set_number(#field, value, config.field), true;
  MOONCACHE_NUMBER(capacity_bytes)
  MOONCACHE_NUMBER(arena_bytes)
  MOONCACHE_NUMBER(quantum_bytes)
  MOONCACHE_NUMBER(expected_block_bytes)
  MOONCACHE_NUMBER(max_block_bytes)
  MOONCACHE_NUMBER(shards)
  MOONCACHE_NUMBER(huge_pages)
  MOONCACHE_NUMBER(numa_node)
  MOONCACHE_NUMBER(probation_percent)
  MOONCACHE_NUMBER(eviction_speed)
  MOONCACHE_NUMBER(ghost_factor)
  MOONCACHE_NUMBER(correlated_ms)
  MOONCACHE_NUMBER(max_victims)
  MOONCACHE_NUMBER(event_log_capacity)
  MOONCACHE_NUMBER(max_ranges)
  MOONCACHE_NUMBER(max_pins)
  MOONCACHE_NUMBER(max_pin_ttl_ms)
#undef MOONCACHE_NUMBER
  if (name == "ssd_paths") {
    if (!nb::try_cast(value, config.disk.paths)) throw nb::value_error("ssd_paths must be a list of str");
    return true;
  }
  if (name == "disk_keys") return set_disk_keys(value, config.disk.keys), true;
  if (name == "encrypted_tenants") {
    if (!nb::try_cast(value, config.disk.encrypted))
      throw nb::value_error("encrypted_tenants must be a list of tenant ids");
    return true;
  }
  if (name == "ssd_bytes") return set_number("ssd_bytes", value, config.disk.bytes), true;
  if (name == "ssd_write_bytes_per_s")
    return set_number("ssd_write_bytes_per_s", value, config.disk.write_bytes_per_s), true;
  if (name == "shared_path") return set_text("shared_path", value, config.disk.shared_path), true;
  if (name == "shared_bytes") return set_number("shared_bytes", value, config.disk.shared_bytes), true;
  if (name == "shared_write_bytes_per_s")
    return set_number("shared_write_bytes_per_s", value, config.disk.shared_write_bytes_per_s), true;
  if (name == "shared_scan_ms") return set_number("shared_scan_ms", value, config.disk.shared_scan_ms), true;
  if (set_shared_objects(name, value, config.disk)) return true;
  if (name == "keep_memory") return set_number("keep_memory", value, config.keep.enabled), true;
  if (name == "kept_fds") {
    if (!nb::try_cast(value, config.keep.fds)) throw nb::value_error("kept_fds must be a list of int");
    return true;
  }
  if (name == "arena_path") return set_text("arena_path", value, config.arena_path), true;
  if (name == "eviction") return set_text("eviction", value, config.eviction), true;
  return false;
}

ServerConfig parse_config(const nb::dict& values) {
  ServerConfig config;
  ArenaGpu gpu;
  bool has_secret = false;
  for (const auto& [key, value] : values) {
    const auto name = nb::cast<std::string>(key);
    if (name == "secret") {
      set_secret(value, config);
      has_secret = true;
    } else if (!set_server_field(name, value, config) && !set_rdma_field(name, value, config.rdma) &&
               !set_store_field(name, value, config.store) && !set_arena_gpu(name, value, gpu)) {
      throw nb::value_error(("unknown setting of the store server: " + name).c_str());
    }
  }
  if (gpu.ordinal >= 0) config.store.open_arena = store::device_arena(gpu.ordinal, gpu.driver);
  if (!has_secret) throw nb::value_error("secret is missing: a node never serves without one");
  return config;
}

std::unique_ptr<StoreServer> create(const nb::dict& values) {
  ServerConfig config = parse_config(values);
  return value_or_raise(without_gil([&] { return StoreServer::create(std::move(config)); }));
}

void start(StoreServer& server) {
  check(without_gil([&] { return server.start(); }));
}

void stop(StoreServer& server, double timeout_s) {
  if (!std::isfinite(timeout_s) || timeout_s < 0)
    throw nb::value_error("timeout_s must be 0 or more seconds");
  without_gil(
      [&] { server.stop(Deadline::after_ms(static_cast<int64_t>(std::min(timeout_s, 86'400.0) * 1000))); });
}

nb::typed<nb::dict, nb::str, nb::any> endpoints(const StoreServer& server) {
  const Endpoints endpoints = server.endpoints();
  nb::dict out;
  out["tcp_host"] = endpoints.tcp_host;
  out["tcp_port"] = endpoints.tcp_port;
  out["unix_path"] = endpoints.unix_path;
  out["tls"] = endpoints.tls;
  return out;
}

nb::typed<nb::dict, nb::str, nb::any> arena(StoreServer& server) {
  const ArenaInfo info = server.store().arena();
  nb::dict out;
  out["kind"] = info.kind;
  out["description"] = info.description;
  out["why_not_shared"] = info.why_not_shared;
  out["why_not_huge"] = info.why_not_huge;
  out["resident_bytes"] = info.resident_bytes;
  out["size_bytes"] = info.size_bytes;
  out["page_bytes"] = info.page_bytes;
  return out;
}

nb::typed<nb::dict, nb::str, nb::any> kept(StoreServer& server) {
  const KeptMemory found = server.store().kept();
  nb::dict out;
  out["adopted"] = found.adopted;
  out["why_not"] = found.why_not;
  out["blocks"] = found.blocks;
  out["bytes"] = found.bytes;
  out["refused"] = found.refused;
  out["held_extents"] = found.held_blocks;
  out["seconds"] = static_cast<double>(found.adopt_us) / 1e6;
  out["threads"] = found.adopting_threads;
  out["fds"] = found.fds;
  return out;
}

nb::typed<nb::dict, nb::str, uint64_t> tend_kept(StoreServer& server, uint64_t max_bytes) {
  const KeptProgress progress = without_gil([&] { return server.store().tend_kept(max_bytes); });
  nb::dict out;
  out["checked_blocks"] = progress.checked_blocks;
  out["checked_bytes"] = progress.checked_bytes;
  out["damaged_blocks"] = progress.damaged_blocks;
  out["left_blocks"] = progress.left_blocks;
  out["held_extents"] = progress.held_blocks;
  return out;
}

void populate(StoreServer& server, uint64_t offset, uint64_t length, uint32_t threads) {
  check(without_gil([&] { return server.store().populate(offset, length, threads); }));
}

nb::typed<nb::dict, nb::str, double> growth_benchmark(uint64_t from_blocks, uint64_t to_blocks) {
  const auto result = without_gil([&] { return store_growth_benchmark({from_blocks, to_blocks}); });
  if (!result) check(result.status());
  nb::typed<nb::dict, nb::str, double> out;
  out["blocks"] = static_cast<double>(result->blocks);
  out["longest_put_ms"] = result->longest_put_ms;
  out["longest_wall_ms"] = result->longest_wall_ms;
  out["mean_put_us"] = result->mean_put_us;
  return out;
}

nb::typed<nb::dict, nb::str, nb::any> disk_rates(const std::string& path, uint64_t disk_bytes,
                                                 uint64_t memory_bytes, uint64_t block_bytes, uint32_t depth,
                                                 uint32_t write_ms, uint32_t read_ms, bool encrypted) {
  const DiskRatesOptions options{path,  disk_bytes, memory_bytes, block_bytes,
                                 depth, write_ms,   read_ms,      encrypted};
  const auto result = without_gil([&] { return disk_rates_benchmark(options); });
  if (!result) check(result.status());
  nb::typed<nb::dict, nb::str, nb::any> out;
  out["written_bytes_per_s"] = result->written_bytes_per_s;
  out["read_bytes_per_s"] = result->read_bytes_per_s;
  out["reads_per_s"] = result->reads_per_s;
  out["write_cpu_ns_per_kib"] = result->write_cpu_ns_per_kib;
  out["read_cpu_ns_per_kib"] = result->read_cpu_ns_per_kib;
  out["admitted_bytes"] = result->admitted_bytes;
  out["written_bytes"] = result->written_bytes;
  out["encrypted_bytes"] = result->encrypted_bytes;
  out["read_misses"] = result->read_misses;
  out["corrupt_blocks"] = result->corrupt_blocks;
  out["queue"] = result->queue;
  return out;
}

nb::typed<nb::dict, nb::str, double> disk_start(const std::string& path, uint64_t records) {
  const auto result = without_gil([&] { return disk_start_benchmark({path, records}); });
  if (!result) check(result.status());
  nb::typed<nb::dict, nb::str, double> out;
  out["records"] = static_cast<double>(result->records);
  out["index_bytes"] = static_cast<double>(result->index_bytes);
  out["cpu_s"] = result->cpu_s;
  out["wall_s"] = result->wall_s;
  return out;
}

nb::typed<nb::dict, nb::str, uint64_t> stats(const StoreServer& server) {
  const auto values = without_gil([&] { return server.stats(); });
  nb::dict out;
  for (const auto& [name, value] : values) out[name.c_str()] = value;
  return out;
}

nb::typed<nb::list, nb::typed<nb::dict, nb::str, nb::any>> rails(const StoreServer& server) {
  nb::list out;
  for (const RailView& rail : without_gil([&] { return server.rails(); })) {
    nb::dict item;
    item["device"] = rail.device;
    item["port"] = rail.port;
    item["address"] = rail.address;
    item["link_layer"] = rail.link_layer;
    item["mtu_bytes"] = rail.mtu_bytes;
    item["numa_node"] = rail.numa_node;
    item["megabits_per_s"] = rail.megabits_per_s;
    item["up"] = rail.up;
    item["connections"] = rail.connections;
    item["grants"] = rail.grants;
    item["granted_bytes"] = rail.granted_bytes;
    item["failures"] = rail.failures;
    out.append(item);
  }
  return out;
}

nb::dict latency_histograms(const StoreServer& server) {
  const auto histograms = without_gil([&] { return server.latency_histograms(); });
  nb::list opcodes;
  for (const OpcodeLatency& latency : histograms.opcodes) {
    nb::dict item;
    item["opcode"] = latency.opcode;
    item["count"] = latency.count;
    item["sum_us"] = latency.sum_us;
    item["buckets"] = latency.buckets;
    opcodes.append(item);
  }
  nb::dict out;
  out["bounds_us"] = histograms.bounds_us;
  out["opcodes"] = opcodes;
  return out;
}

std::vector<std::tuple<int, std::string, std::string>> drain_log(StoreServer& server, size_t max_events) {
  std::vector<std::tuple<int, std::string, std::string>> out;
  for (auto& event : without_gil([&] { return server.drain_log(max_events); })) {
    out.emplace_back(event.level, std::move(event.event), std::move(event.message));
  }
  return out;
}

nb::typed<nb::tuple, uint64_t, uint64_t, bool, nb::bytes> drain_events(StoreServer& server,
                                                                       uint64_t max_events) {
  const EventBatch batch = without_gil([&] { return server.store().drain_events(max_events); });
  return nb::make_tuple(batch.first_seq, batch.last_seq, batch.overflow, to_bytes(batch.records));
}

nb::typed<nb::tuple, uint64_t, nb::bytes> snapshot(StoreServer& server, uint64_t cursor,
                                                   uint32_t max_records) {
  const SnapshotPage page = without_gil([&] { return server.store().snapshot(cursor, max_records); });
  return nb::make_tuple(page.next_cursor, to_bytes(page.records));
}

void set_limits(StoreServer& server, const std::string& tenant, uint64_t memory_quota_bytes,
                uint64_t memory_share_bytes, uint64_t disk_quota_bytes, uint64_t disk_share_bytes,
                uint64_t bytes_per_s, uint64_t ttl_ms, bool encrypted) {
  const TenantLimits limits{{memory_quota_bytes, memory_share_bytes},
                            {disk_quota_bytes, disk_share_bytes},
                            bytes_per_s,
                            ttl_ms,
                            encrypted};
  check(without_gil([&] { return server.set_limits(tenant, limits); }));
}

void set_secrets(StoreServer& server, const std::vector<nb::bytes>& secrets) {
  std::vector<std::array<std::byte, 32>> raw;
  for (const nb::bytes& secret : secrets) {
    if (secret.size() != 32) throw nb::value_error("a secret must be 32 bytes");
    std::memcpy(raw.emplace_back().data(), secret.c_str(), 32);
  }
  check(without_gil([&] { return server.set_secrets(raw); }));
}

std::vector<std::pair<uint64_t, uint64_t>> secret_uses(const StoreServer& server) {
  std::vector<std::pair<uint64_t, uint64_t>> uses;
  for (const SecretUse& use : server.secret_uses())
    uses.emplace_back(use.connections, use.last_proven_unix_s);
  return uses;
}

void set_keys(StoreServer& server, const std::string& tenant, const std::vector<nb::bytes>& keys) {
  std::vector<DiskKey> raw = disk_keys_of(keys);
  const Status set = without_gil([&] { return server.set_keys(tenant, raw); });
  for (DiskKey& key : raw) ::explicit_bzero(key.data(), key.size());
  check(set);
}

constexpr std::pair<const char*, uint64_t TenantUsage::*> kFigures[] = {
    {"bytes", &TenantUsage::bytes},
    {"blocks", &TenantUsage::blocks},
    {"disk_bytes", &TenantUsage::disk_bytes},
    {"disk_blocks", &TenantUsage::disk_blocks},
    {"hits", &TenantUsage::hits},
    {"hit_bytes", &TenantUsage::hit_bytes},
    {"misses", &TenantUsage::misses},
    {"stored_blocks", &TenantUsage::stored_blocks},
    {"stored_bytes", &TenantUsage::stored_bytes},
    {"evicted_blocks", &TenantUsage::evicted_blocks},
    {"evicted_bytes", &TenantUsage::evicted_bytes},
    {"down_blocks", &TenantUsage::down_blocks},
    {"down_bytes", &TenantUsage::down_bytes},
    {"up_blocks", &TenantUsage::up_blocks},
    {"up_bytes", &TenantUsage::up_bytes},
    {"refused", &TenantUsage::refused},
    {"throttled", &TenantUsage::throttled},
    {"expired_blocks", &TenantUsage::expired_blocks},
    {"byte_ms", &TenantUsage::byte_ms},
    {"disk_byte_ms", &TenantUsage::disk_byte_ms},
};

std::map<std::string, uint64_t> figures_of(const TenantUsage& use) {
  std::map<std::string, uint64_t> figures;
  for (const auto& [name, figure] : kFigures) figures.emplace(name, use.*figure);
  return figures;
}

// By tenant id. 0, which no name has: the sums of tenants that are not remembered one by one.
std::map<TenantId, std::map<std::string, uint64_t>> tend_tenants(StoreServer& server, uint32_t max_slots) {
  std::map<TenantId, std::map<std::string, uint64_t>> all;
  without_gil([&] {
    server.store().tend_tenants(StoreServer::now_ms(), max_slots);
    for (const TenantUsage& use : server.store().tenants()) all.emplace(use.tenant, figures_of(use));
    all.emplace(0, figures_of(server.store().other_tenants()));
    return 0;
  });
  return all;
}

std::map<std::string, uint64_t> purge(StoreServer& server, TenantId tenant, uint64_t cursor) {
  const Purged done = without_gil([&] { return server.store().purge(tenant, cursor); });
  return {{"next_cursor", done.next_cursor},
          {"blocks", done.blocks},
          {"bytes", done.bytes},
          {"held_blocks", done.held_blocks},
          {"held_bytes", done.held_bytes},
          {"disk_blocks", done.disk_blocks},
          {"disk_bytes", done.disk_bytes},
          {"failed_blocks", done.failed_blocks}};
}

// One code per key.
template <typename Action>
std::vector<int> for_each_key(nb::handle packed, Action action) {
  const std::vector<Key> keys = parse_keys(BufferView(packed));
  return without_gil([&] {
    std::vector<int> codes;
    codes.reserve(keys.size());
    for (const Key& key : keys) codes.push_back(static_cast<int>(action(key)));
    return codes;
  });
}

std::vector<int> remove(StoreServer& server, TenantId tenant, nb::handle keys, uint8_t reason, bool force) {
  if (reason >= kRemoveReasons) throw nb::value_error("reason must be from 0 to 5");
  return for_each_key(keys, [&](const Key& key) {
    return server.store().remove(tenant, key, static_cast<RemoveReason>(reason), StoreServer::now_ms(),
                                 force);
  });
}

std::vector<int> pin(StoreServer& server, TenantId tenant, nb::handle keys, uint64_t ttl_ms) {
  return for_each_key(
      keys, [&](const Key& key) { return server.store().pin(tenant, key, ttl_ms, StoreServer::now_ms()); });
}

std::vector<int> unpin(StoreServer& server, TenantId tenant, nb::handle keys) {
  return for_each_key(keys, [&](const Key& key) { return server.store().unpin(tenant, key); });
}

std::string broken_invariant(const StoreServer& server) {
  return without_gil([&] {
    std::string why;
    return const_cast<StoreServer&>(server).store().check(&why) ? std::string() : why;
  });
}

int corrupt(StoreServer& server, TenantId tenant, nb::handle key, uint64_t bit) {
  const std::vector<Key> keys = parse_keys(BufferView(key));
  if (keys.size() != 1) throw nb::value_error("key must be 32 bytes");
  return static_cast<int>(without_gil([&] { return server.store().flip_bit(tenant, keys[0], bit); }));
}

}  // namespace

void bind_store(nb::module_& m) {
  auto bound =
      nb::class_<StoreServer>(
          m, "StoreServer",
          "Data-plane server of a store node and its store. Calls that fail as a whole raise "
          "RuntimeError(code, name, message); batches report one code per key.")
          .def(nb::new_(&create), "config"_a)
          .def("start", &start)
          .def("stop", &stop, "timeout_s"_a = 5.0)
          .def("endpoints", &endpoints)
          .def("arena", &arena)
          .def("populate", &populate, "offset"_a, "length"_a, "threads"_a,
               "Puts memory behind these bytes of the arena.")
          .def("kept", &kept, "What became of the memory of a former process, and what the next one needs.")
          .def("tend_kept", &tend_kept, "max_bytes"_a,
               "Compares adopted blocks with their checksums, and frees extents that no former client can "
               "write "
               "now.")
          .def("stats", &stats)
          .def("latency_histograms", &latency_histograms)
          .def("rails", &rails)
          .def("drain_log", &drain_log, "max_events"_a = 256)
          .def("drain_events", &drain_events, "max_events"_a)
          .def("event_seq", [](StoreServer& server) { return server.store().event_seq(); })
          .def("snapshot", &snapshot, "cursor"_a, "max_records"_a)
          .def(
              "set_draining",
              [](StoreServer& server, bool draining) {
                without_gil([&] { server.store().set_draining(draining); });
              },
              "draining"_a)
          .def("set_limits", &set_limits, "tenant"_a, nb::kw_only(), "memory_quota_bytes"_a = 0,
               "memory_share_bytes"_a = 0, "disk_quota_bytes"_a = 0, "disk_share_bytes"_a = 0,
               "bytes_per_s"_a = 0, "ttl_ms"_a = 0, "encrypted"_a = false)
          .def("set_secrets", &set_secrets, "secrets"_a,
               "The cluster's secrets of 32 bytes that peers may prove from now on.")
          .def("secret_uses", &secret_uses,
               "(open connections, Unix time in seconds of the last proof or 0) of each secret.")
          .def("set_keys", &set_keys, "tenant"_a, "keys"_a,
               "Keys of 32 bytes that the tenant's blocks are encrypted with on disks: the first one writes, "
               "all "
               "of "
               "them read.")
          .def("tend_tenants", &tend_tenants, "max_slots"_a,
               "Counts what tenants have held since the last call and ends blocks that are too old. Figures "
               "by "
               "tenant id; 0: of all that are not remembered.")
          .def("purge", &purge, "tenant_id"_a, "cursor"_a,
               "Overwrites a page of a tenant's blocks; next_cursor 0: it was the last one.")
          .def("remove", &remove, "tenant_id"_a, "keys"_a, "reason"_a, "force"_a = false)
          .def("pin", &pin, "tenant_id"_a, "keys"_a, "ttl_ms"_a)
          .def("unpin", &unpin, "tenant_id"_a, "keys"_a)
          .def("tenants", [](const StoreServer& server) { return server.tenants(); })
          .def("check", &broken_invariant,
               "Empty when every invariant of the store holds, else the first broken one.")
          .def("corrupt", &corrupt, "tenant_id"_a, "key"_a, "bit"_a,
               "Fault injection for tests: flips one stored bit. Returns a code.");
  bind_writers(bound);
  bind_cluster_map(bound);
  m.def(
      "store_growth_benchmark", &growth_benchmark, "from_blocks"_a, "to_blocks"_a,
      "Fills a store of small blocks: the longest put between these two counts, in processor time and by the "
      "clock, and the mean.");
  m.def("disk_rates_benchmark", &disk_rates, "path"_a, "disk_bytes"_a, "memory_bytes"_a, "block_bytes"_a,
        "depth"_a, "write_ms"_a, "read_ms"_a, "encrypted"_a = false,
        "What the SSD tier writes and reads in this folder, through a store, and its processor time.");
  m.def("disk_start_benchmark", &disk_start, "path"_a, "records"_a,
        "Writes so many small blocks to a disk in this folder, and opens it again: the time that takes.");
}

}  // namespace mooncache::python
