// Client and CancelToken for Python. Arguments become slices, the GIL is released for the call,
// the answers become plain tuples and lists.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/variant.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <memory>
#include <optional>

#include "client_arguments.h"
#include "client_buffers.h"
#include "module.h"
#include "mooncache/client.h"
#include "rdma_arguments.h"

namespace nb = nanobind;

namespace mooncache::python {

namespace {

// Python's handlers run on its main thread only, and with the GIL. One that raises leaves the exception for
// interruptible().
bool signal_raised() {
  const nb::gil_scoped_acquire held;
  return PyErr_Occurred() != nullptr || PyErr_CheckSignals() != 0;
}

}  // namespace

CallOptions to_options(double timeout_s, const CancelToken* cancel, std::optional<uint32_t> node) {
  CallOptions options;
  options.deadline = deadline_in(timeout_s);
  options.cancel = cancel;
  if (gettid() == getpid()) options.interrupted = &signal_raised;
  options.node = node;
  return options;
}

namespace {

using Codes = nb::typed<nb::list, int>;
using Flags = nb::typed<nb::tuple, bool, nb::ellipsis>;
using NamedCounts = nb::typed<nb::dict, nb::str, uint64_t>;
using Numbers = nb::typed<nb::list, uint32_t>;
using Places = nb::typed<nb::list, nb::typed<nb::list, nb::typed<nb::tuple, uint32_t, int>>>;
using MatchAnswer = nb::typed<nb::tuple, uint32_t, Flags, uint32_t, Places, Numbers>;
using PrefetchAnswer = nb::typed<nb::tuple, uint64_t, uint64_t>;
using ListedEntry = nb::typed<nb::tuple, nb::bytes, uint64_t, int, uint64_t>;
using BlockPage = nb::typed<nb::tuple, uint64_t, nb::typed<nb::list, ListedEntry>>;
using BytesOrCodes = nb::typed<nb::list, std::variant<nb::bytes, int>>;
using Positions = nb::typed<nb::list, uint32_t>;
using Transports = nb::typed<nb::list, nb::typed<nb::tuple, nb::str, nb::str, nb::str>>;

}  // namespace

PutAnswers answers(std::span<const PutOutcome> outcomes) {
  nb::list result;
  for (const PutOutcome& outcome : outcomes) {
    result.append(
        nb::make_tuple(static_cast<int>(outcome.code), node_or_none(outcome.node_index), outcome.created));
  }
  return result;
}

GetAnswers answers(std::span<const GetOutcome> outcomes) {
  nb::list result;
  for (const GetOutcome& outcome : outcomes) {
    result.append(
        nb::make_tuple(static_cast<int>(outcome.code), outcome.size, node_or_none(outcome.node_index)));
  }
  return result;
}

namespace {

template <typename T>
void take(const nb::dict& from, const char* name, T& into, std::vector<std::string>& known) {
  known.emplace_back(name);
  if (from.contains(name)) into = nb::cast<T>(from[name]);
}

void take_ms(const nb::dict& from, const char* name, uint32_t& into, std::vector<std::string>& known) {
  double seconds = into / 1000.0;
  take(from, name, seconds, known);
  if (!(seconds >= 0 && seconds < 4e6)) refuse(std::string(name) + " must be a number of seconds, 0 or more");
  into = static_cast<uint32_t>(std::lround(seconds * 1000));
}

void take_secret(const nb::dict& from, Credentials& credentials, std::vector<std::string>& known) {
  known.emplace_back("key");
  if (!from.contains("key")) refuse("config needs \"key\": the 32 secret bytes of the token");
  const nb::object key = from["key"];
  if (!PyBytes_Check(key.ptr()) || PyBytes_GET_SIZE(key.ptr()) != 32)
    refuse("config[\"key\"] must be 32 bytes");
  std::memcpy(credentials.key.data(), PyBytes_AS_STRING(key.ptr()), 32);
}

void set_key(Client& client, const nb::bytes& key) {
  std::array<std::byte, 32> raw{};
  if (key.size() != raw.size()) refuse("a key has 32 bytes");
  std::memcpy(raw.data(), key.c_str(), raw.size());
  const nb::gil_scoped_release released;
  client.set_key(raw);
}

ClientConfig to_config(const nb::dict& from) {
  ClientConfig config;
  std::vector<std::string> known;
  take_secret(from, config.credentials, known);
  take(from, "tenant", config.credentials.tenant, known);
  take(from, "admin", config.credentials.admin, known);
  take(from, "session_end_unix_s", config.credentials.expires_unix_s, known);
  take(from, "client_name", config.credentials.client_name, known);
  take(from, "writer_id", config.credentials.writer.id, known);
  take(from, "writer_instance", config.credentials.writer.instance, known);
  take(from, "writer_build", config.credentials.writer.build, known);
  take(from, "writer_started_unix_s", config.credentials.writer.started_unix_s, known);
  take(from, "host_id", config.host_id, known);
  take(from, "tls", config.tls.enabled, known);
  take(from, "tls_ca", config.tls.ca_file, known);
  take(from, "tls_cert", config.tls.cert_file, known);
  take(from, "tls_key", config.tls.key_file, known);
  take(from, "tls_server_name", config.tls.server_name, known);
  take(from, "lanes_per_node", config.lanes_per_node, known);
  take_ms(from, "connect_timeout_s", config.connect_timeout_ms, known);
  take_ms(from, "idle_timeout_s", config.idle_timeout_ms, known);
  take_ms(from, "stall_timeout_s", config.stall_timeout_ms, known);
  take_ms(from, "put_wait_s", config.put_wait_ms, known);
  take(from, "shm_enabled", config.shm_enabled, known);
  take(from, "shm_min_bytes", config.shm_min_bytes, known);
  take(from, "frame_bytes", config.frame_bytes, known);
  take(from, "frame_items", config.frame_items, known);
  take(from, "window_frames", config.window_frames, known);
  take(from, "spin_us", config.spin_us, known);
  take(from, "breaker_failures", config.breaker_failures, known);
  take_ms(from, "breaker_min_s", config.breaker_min_ms, known);
  take_ms(from, "breaker_max_s", config.breaker_max_ms, known);
  take(from, "retry_percent", config.retry_percent, known);
  take(from, "retry_burst", config.retry_burst, known);
  take(from, "retries_per_call", config.retries_per_call, known);
  take_ms(from, "slow_start_s", config.slow_start_ms, known);
  take(from, "hedge_percent", config.hedge_percent, known);
  take_ms(from, "hedge_min_s", config.hedge_min_ms, known);
  take_ms(from, "hedge_max_s", config.hedge_max_ms, known);
  take(from, "fanout_nodes_max", config.fanout_nodes_max, known);
  take(from, "survey_ms", config.survey_ms, known);
  take(from, "location_cache_keys", config.location_cache_keys, known);
  take(from, "receive_pool_bytes", config.receive_pool_bytes, known);
  take(from, "registered_bytes_max", config.registered_bytes_max, known);
  take(from, "registered_buffers_max", config.registered_buffers_max, known);
  for (const auto& [name, value] : from) {
    const auto text = nb::cast<std::string>(name);
    if (set_rdma_field(text, value, config.rdma)) continue;
    if (std::find(known.begin(), known.end(), text) == known.end())
      refuse("unknown client setting \"" + text + "\"");
  }
  return config;
}

NodeHealth to_health(std::string state) {
  for (char& c : state) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  if (state == "active") return NodeHealth::kActive;
  if (state == "suspect") return NodeHealth::kSuspect;
  if (state == "draining") return NodeHealth::kDraining;
  if (state == "dead") return NodeHealth::kDead;
  refuse("state must be active, suspect, draining or dead, not \"" + state + "\"");
}

std::vector<NodeInfo> to_nodes(const nb::list& list) {
  std::vector<NodeInfo> nodes;
  for (nb::handle item : list) {
    const auto from = nb::cast<nb::dict>(item);
    NodeInfo node;
    std::vector<std::string> known;
    std::string state = "active", arena;
    take(from, "index", node.index, known);
    take(from, "node_id", node.node_id, known);
    take(from, "host_id", node.host_id, known);
    take(from, "incarnation", node.incarnation, known);
    take(from, "tcp_host", node.tcp_host, known);
    take(from, "tcp_port", node.tcp_port, known);
    take(from, "unix_path", node.unix_path, known);
    take(from, "free_bytes", node.free_bytes, known);
    take(from, "weight", node.weight, known);
    take(from, "state", state, known);
    take(from, "arena", arena, known);
    take(from, "rdma", node.rdma, known);
    node.medium = medium_of(arena);
    node.mappable = mappable_arena(arena);
    node.state = to_health(state);
    nodes.push_back(std::move(node));
  }
  return nodes;
}

Codes codes_list(std::span<const Code> codes) {
  nb::list list;
  for (const Code code : codes) list.append(static_cast<int>(code));
  return list;
}

NamedCounts values_dict(const NamedValues& values) {
  nb::dict dict;
  for (const auto& [name, value] : values) dict[name.c_str()] = value;
  return dict;
}

PutAnswers put(Client& client, nb::handle keys_in, nb::handle sources, uint32_t replicas, double timeout_s,
               const CancelToken* cancel, std::optional<uint32_t> node, std::optional<uint32_t> prefer_node,
               StagedTally* tally) {
  const auto keys = to_keys(keys_in);
  CallOptions options = to_options(timeout_s, cancel, node);
  options.prefer_node = prefer_node;
  if (tally != nullptr) options.staged_bytes = &tally->bytes;
  Batch<ConstSlice> batch(sources, keys.size(), false, "sources");
  std::vector<PutBlock> blocks(keys.size());
  for (size_t i = 0; i < keys.size(); ++i) blocks[i] = {keys[i], batch.of(i)};
  std::vector<PutOutcome> outcomes(keys.size());
  check(interruptible([&] { return client.put(blocks, replicas, options, outcomes); }));
  return answers(outcomes);
}

GetAnswers get(Client& client, nb::handle keys_in, nb::handle destinations, double timeout_s,
               const CancelToken* cancel, nb::object offsets, std::optional<uint32_t> node,
               StagedTally* tally) {
  const auto keys = to_keys(keys_in);
  CallOptions options = to_options(timeout_s, cancel, node);
  if (tally != nullptr) options.staged_bytes = &tally->bytes;
  Batch<Slice> batch(destinations, keys.size(), true, "destinations");
  GetOptions how;
  std::vector<GetBlock> blocks(keys.size());
  for (size_t i = 0; i < keys.size(); ++i) blocks[i] = {keys[i], batch.of(i), 0};
  if (!offsets.is_none()) {
    how.whole = false;
    size_t i = 0;
    for (nb::handle offset : offsets) {
      if (i == keys.size()) refuse("more offsets than keys");
      blocks[i++].offset = nb::cast<uint64_t>(offset);
    }
    if (i != keys.size()) refuse("one offset per key is needed");
  }
  std::vector<GetOutcome> outcomes(keys.size());
  check(interruptible([&] { return client.get(blocks, how, options, outcomes); }));
  return answers(outcomes);
}

// Memory of the right size, made once the node said the size: lent by the client (a ReceivedBlock) if that is
// asked for and there is some, else a bytes object. An int (the code) where there is no block.
nb::list get_sized(Client& client, nb::handle keys_in, double timeout_s, const CancelToken* cancel,
                   std::optional<uint32_t> node, bool lend) {
  const auto keys = to_keys(keys_in);
  std::vector<std::unique_ptr<LentBuffer>> lent(keys.size());
  const CallOptions options = to_options(timeout_s, cancel, node);
  std::vector<nb::object> made(keys.size());
  std::vector<GetBlock> blocks(keys.size());
  for (size_t i = 0; i < keys.size(); ++i) blocks[i] = {keys[i], {}, 0};
  GetOptions how;
  how.allocate = [&](size_t item, uint64_t size) -> std::byte* {
    lent[item] = lend ? client.receive_buffer(size) : nullptr;
    if (lent[item]) return lent[item]->data();
    const nb::gil_scoped_acquire held;
    PyObject* bytes = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(size));
    if (bytes == nullptr) {
      PyErr_Clear();
      return nullptr;
    }
    made[item] = nb::steal(bytes);
    return static_cast<std::byte*>(static_cast<void*>(PyBytes_AS_STRING(bytes)));
  };
  std::vector<GetOutcome> outcomes(keys.size());
  check(interruptible([&] { return client.get(blocks, how, options, outcomes); }));
  nb::list result;
  for (size_t i = 0; i < keys.size(); ++i) {
    if (outcomes[i].code == Code::kOk && lent[i])
      result.append(std::make_unique<Received>(std::move(lent[i])));
    else if (outcomes[i].code == Code::kOk && made[i].is_valid())
      result.append(made[i]);
    else
      result.append(static_cast<int>(outcomes[i].code));
  }
  return result;
}

MatchReport run_match(Client& client, std::span<const Key> keys, double timeout_s, bool touch,
                      const CancelToken* cancel, std::optional<uint32_t> node, bool all_nodes = false) {
  CallOptions options = to_options(timeout_s, cancel, node);
  options.all_nodes = all_nodes;
  return value_or_raise(interruptible([&] { return client.match(keys, touch, options); }));
}

// A bool for each key: made here, because a loop in Python over the keys of a long prompt holds others up.
Flags present_flags(const MatchReport& report, size_t count) {
  nb::object flags = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(count)));
  if (!flags.is_valid()) throw nb::python_error();
  for (size_t i = 0; i < count; ++i) {
    const bool there = bit_at(report.bitmap, i);
    PyTuple_SET_ITEM(flags.ptr(), static_cast<Py_ssize_t>(i), Py_NewRef(there ? Py_True : Py_False));
  }
  return Flags(nb::borrow<nb::tuple>(flags));
}

Places copies_list(const std::vector<std::vector<BlockCopy>>& places) {
  nb::list found;
  for (const std::vector<BlockCopy>& copies : places) {
    nb::list place;
    for (const BlockCopy& copy : copies)
      place.append(nb::make_tuple(copy.node_index, static_cast<int>(copy.tier)));
    found.append(place);
  }
  return Places(nb::borrow<nb::list>(found));
}

Numbers place_numbers(const std::vector<uint32_t>& numbers) {
  nb::list found;
  for (const uint32_t number : numbers) found.append(number);
  return Numbers(nb::borrow<nb::list>(found));
}

template <typename Call>
Codes coded(nb::handle keys_in, Call call) {
  const auto keys = to_keys(keys_in);
  std::vector<Code> codes(keys.size(), Code::kNotFound);
  check(interruptible([&] { return call(keys, codes); }));
  return codes_list(codes);
}

nb::typed<nb::list, std::optional<nb::dict>> stat(Client& client, nb::handle keys_in, double timeout_s,
                                                  const CancelToken* cancel, std::optional<uint32_t> node) {
  const auto keys = to_keys(keys_in);
  const CallOptions options = to_options(timeout_s, cancel, node);
  std::vector<BlockStat> stats(keys.size());
  check(interruptible([&] { return client.stat(keys, options, stats); }));
  nb::list result;
  for (const BlockStat& stat : stats) {
    if (stat.code == Code::kNotFound) {
      result.append(nb::none());
      continue;
    }
    nb::dict entry;
    entry["code"] = static_cast<int>(stat.code);
    entry["node_index"] = node_or_none(stat.node_index);
    entry["tier"] = static_cast<int>(stat.tier);
    entry["crc32c"] = stat.crc32c;
    entry["size_bytes"] = stat.size;
    entry["pins"] = stat.pins;
    entry["hits"] = stat.hits;
    entry["age_s"] = static_cast<double>(stat.age_ms) / 1000.0;
    nb::list copies;
    for (const BlockCopy& copy : stat.copies)
      copies.append(nb::make_tuple(copy.node_index, static_cast<int>(copy.tier)));
    entry["copies"] = copies;
    result.append(entry);
  }
  return result;
}

BlockPage list_blocks(Client& client, uint32_t node, uint64_t cursor, uint32_t limit, double timeout_s,
                      const CancelToken* cancel) {
  const CallOptions options = to_options(timeout_s, cancel, std::nullopt);
  const ListedPage page =
      value_or_raise(interruptible([&] { return client.list(node, cursor, limit, options); }));
  nb::list blocks;
  for (const ListedBlock& block : page.blocks) {
    blocks.append(nb::make_tuple(nb::bytes(block.key.bytes.data(), kKeyBytes), block.size,
                                 static_cast<int>(block.tier), block.hits));
  }
  return nb::make_tuple(page.next_cursor, blocks);
}

void bind_match(nb::class_<Client>& c) {
  const auto timeout = nb::arg("timeout_s") = 30.0;
  const auto cancel = nb::arg("cancel").none() = nb::none();
  const auto node = nb::arg("node").none() = nb::none();
  using Node = std::optional<uint32_t>;
  c.def(
      "match",
      [](Client& client, nb::handle keys, double timeout_s, bool touch, const CancelToken* token, Node on,
         bool all_nodes) -> MatchAnswer {
        const auto batch = to_keys(keys);
        const MatchReport report = run_match(client, batch, timeout_s, touch, token, on, all_nodes);
        return nb::make_tuple(report.leading_run, present_flags(report, batch.size()),
                              report.unreachable_nodes, copies_list(report.places),
                              place_numbers(report.place_of));
      },
      nb::arg("keys"), timeout, nb::arg("touch") = true, cancel, node, nb::arg("all_nodes") = false,
      "-> (leading_run, a bool for each key, unreachable_nodes, places, for each key its number in places); "
      "a place is [(node index, tier)] in the order of reading; all_nodes: every node is asked, however many "
      "there are");
  c.def(
      "prefetch",
      [](Client& client, nb::handle keys, uint64_t max_bytes, double begin_s,
         double timeout_s) -> PrefetchAnswer {
        if (!(begin_s > 0 && begin_s <= 3600)) refuse("begin_s must be above 0 and at most an hour");
        const auto batch = to_keys(keys);
        const PrefetchLimits limits{max_bytes, static_cast<uint32_t>(std::max(1.0, begin_s * 1000))};
        const CallOptions options = to_options(timeout_s, nullptr, std::nullopt);
        const PrefetchReport report =
            value_or_raise(interruptible([&] { return client.prefetch(batch, limits, options); }));
        return nb::make_tuple(report.blocks, report.bytes);
      },
      nb::arg("keys"), nb::arg("max_bytes"), nb::arg("begin_s"), timeout,
      "-> blocks and bytes that begin to come up from disks, as far as match has heard of them");
}

void bind_control(nb::class_<Client>& c) {
  const auto timeout = nb::arg("timeout_s") = 30.0;
  const auto cancel = nb::arg("cancel").none() = nb::none();
  const auto node = nb::arg("node").none() = nb::none();
  using Node = std::optional<uint32_t>;
  c.def(
      "exists",
      [](Client& client, nb::handle keys, double timeout_s, const CancelToken* token, Node on) {
        const auto batch = to_keys(keys);
        return present_flags(run_match(client, batch, timeout_s, false, token, on), batch.size());
      },
      nb::arg("keys"), timeout, cancel, node, "-> a bool for each key");
  c.def(
      "remove",
      [](Client& client, nb::handle keys, double timeout_s, const CancelToken* token, Node on) {
        const CallOptions options = to_options(timeout_s, token, on);
        return coded(keys, [&](const auto& k, auto& codes) { return client.remove(k, options, codes); });
      },
      nb::arg("keys"), timeout, cancel, node);
  c.def(
      "pin",
      [](Client& client, nb::handle keys, double ttl_s, double timeout_s, const CancelToken* token, Node on) {
        if (!(ttl_s > 0 && ttl_s < 4e6)) refuse("ttl_s must be a number of seconds above 0");
        const auto ttl_ms = static_cast<uint32_t>(std::max(1.0, ttl_s * 1000));
        const CallOptions options = to_options(timeout_s, token, on);
        return coded(keys, [&](const auto& k, auto& codes) { return client.pin(k, ttl_ms, options, codes); });
      },
      nb::arg("keys"), nb::arg("ttl_s"), timeout, cancel, node);
  c.def(
      "unpin",
      [](Client& client, nb::handle keys, double timeout_s, const CancelToken* token, Node on) {
        const CallOptions options = to_options(timeout_s, token, on);
        return coded(keys, [&](const auto& k, auto& codes) { return client.unpin(k, options, codes); });
      },
      nb::arg("keys"), timeout, cancel, node);
  c.def("stat", &stat, nb::arg("keys"), timeout, cancel, node,
        "-> list of dict, None where there is no block");
  c.def("list_blocks", &list_blocks, nb::arg("node"), nb::arg("cursor") = 0, nb::arg("limit") = 1000, timeout,
        cancel, "-> (next_cursor, [(key, size_bytes, tier, hits)]); next_cursor 0: that was the last page");
  c.def(
      "node_stat",
      [](Client& client, uint32_t on, double timeout_s) {
        const CallOptions options = to_options(timeout_s, nullptr, std::nullopt);
        return values_dict(value_or_raise(interruptible([&] { return client.node_stat(on, options); })));
      },
      nb::arg("node"), timeout);
  c.def(
      "ping",
      [](Client& client, uint32_t on, double timeout_s) {
        const CallOptions options = to_options(timeout_s, nullptr, std::nullopt);
        const uint64_t us = value_or_raise(interruptible([&] { return client.ping(on, options); }));
        return static_cast<double>(us) / 1e6;
      },
      nb::arg("node"), timeout, "-> round trip in seconds");
}

void bind_blocks(nb::class_<Client>& c) {
  const auto cancel = nb::arg("cancel").none() = nb::none();
  const auto node = nb::arg("node").none() = nb::none();
  const auto tally = nb::arg("tally").none() = nb::none();
  c.def("put", &put, nb::arg("keys"), nb::arg("sources"), nb::arg("replicas") = 1,
        nb::arg("timeout_s") = 30.0, cancel, node, nb::arg("prefer_node").none() = nb::none(), tally,
        "-> [(code, node_index, created)]; prefer_node: the first copy goes there when the node takes new "
        "blocks");
  c.def("get", &get, nb::arg("keys"), nb::arg("destinations"), nb::arg("timeout_s") = 30.0, cancel,
        nb::arg("offsets").none() = nb::none(), node, tally, "-> [(code, size_bytes, node_index)]");
  c.def(
      "get_bytes",
      [](Client& client, nb::handle keys, double timeout_s, const CancelToken* token,
         std::optional<uint32_t> on) -> BytesOrCodes {
        return get_sized(client, keys, timeout_s, token, on, false);
      },
      nb::arg("keys"), nb::arg("timeout_s") = 30.0, cancel, node,
      "-> list of bytes, or of the code (int) where there is no block");
  c.def(
      "get_lent",
      [](Client& client, nb::handle keys, double timeout_s, const CancelToken* token,
         std::optional<uint32_t> on) { return get_sized(client, keys, timeout_s, token, on, true); },
      nb::arg("keys"), nb::arg("timeout_s") = 30.0, cancel, node,
      "-> list of ReceivedBlock, of bytes where no memory was left to lend, of the code (int) where there is "
      "no block");
}

void bind_figures(nb::class_<Client>& c) {
  c.def("stats", [](Client& client) { return values_dict(without_gil([&] { return client.stats(); })); });
  c.def(
      "transports",
      [](const Client& client) -> Transports {
        nb::list list;
        for (const ClientTransport& way : client.transports())
          list.append(nb::make_tuple(way.name, way.state, way.reason));
        return list;
      },
      "-> [(name, state, reason)], best first; opens nothing.");
  c.def(
      "latency_histograms",
      [](Client& client) {
        nb::dict dict;
        for (const LatencyHistogram& histogram : client.latencies()) {
          nb::list counts;
          for (const uint64_t count : histogram.counts) counts.append(count);
          nb::dict entry;
          entry["counts"] = counts;
          entry["count"] = histogram.count;
          entry["sum_us"] = histogram.total_us;
          dict[histogram.name.c_str()] = entry;
        }
        return dict;
      },
      "name -> {counts, count, sum_us}; bucket i counts latencies below 2**i microseconds");
}

}  // namespace

void bind_client(nb::module_& m) {
  nb::class_<CancelToken>(m, "CancelToken", "Stops calls from another thread; stays cancelled.")
      .def(nb::init<>())
      .def("cancel", &CancelToken::cancel)
      .def_prop_ro("cancelled", &CancelToken::cancelled);
  nb::class_<StagedTally>(m, "StagedTally", "Bytes that passed through staging memory of the client.")
      .def(nb::init<>())
      .def_prop_ro("bytes", [](const StagedTally& tally) { return tally.bytes.load(); });
  m.def(
      "place",
      [](nb::handle key, const nb::list& nodes, const std::string& host_id, size_t count) -> Positions {
        const auto keys = to_keys(key);
        if (keys.size() != 1) refuse("one key of 32 bytes is needed");
        nb::list positions;
        for (const uint32_t position : place(keys[0], to_nodes(nodes), host_id, count))
          positions.append(position);
        return positions;
      },
      nb::arg("key"), nb::arg("nodes"), nb::arg("host_id"), nb::arg("count"),
      "Positions of the nodes for a block, best first.");
  nb::class_<Client> c(m, "Client",
                       "Cluster client. Failed calls raise RuntimeError(code, name, message); batches report "
                       "one code per item.");
  const auto cancel = nb::arg("cancel").none() = nb::none();
  const auto node = nb::arg("node").none() = nb::none();
  c.def(nb::new_([](const nb::dict& config) { return value_or_raise(Client::create(to_config(config))); }),
        nb::arg("config"));
  c.def(
      "set_map",
      [](Client& client, uint64_t epoch, const nb::list& nodes) {
        return client.set_map(epoch, to_nodes(nodes));
      },
      nb::arg("epoch"), nb::arg("nodes"), "False when the map is older than the one in use.");
  c.def_prop_ro("map_epoch", &Client::map_epoch);
  c.def("set_key", &set_key, nb::arg("key"),
        "Connections that are made from now on prove this key (32 bytes) of the same tenant.");
  bind_blocks(c);
  bind_buffers(m, c);
  bind_watch(m, c);
  bind_match(c);
  bind_control(c);
  bind_reservations(m, c);
  c.def(
      "unlocated",
      [](Client& client, nb::handle keys) -> Positions {
        nb::list list;
        for (const uint32_t position : client.unlocated(to_keys(keys))) list.append(position);
        return list;
      },
      nb::arg("keys"), "Positions of keys that only the directory can locate.");
  c.def(
      "learn_locations",
      [](Client& client, nb::handle keys, const nb::bytes& packed) {
        check(client.learn_locations(to_keys(keys), std::as_bytes(std::span(packed.c_str(), packed.size()))));
      },
      nb::arg("keys"), nb::arg("packed"));
  bind_figures(c);
  c.def("close", [](Client& client) {
    const nb::gil_scoped_release released;
    client.close();
  });
}

}  // namespace mooncache::python
