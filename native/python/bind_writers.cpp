// Who wrote blocks, and their recall: the part of the class StoreServer that bind_store.cpp leaves to this
// file.
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "calls.h"
#include "packed_keys.h"
#include "store_server.h"

using namespace nanobind::literals;

namespace mooncache::python {

namespace {

uint64_t unix_s_of(uint32_t written_s) {
  return written_s == 0 ? 0 : kOriginEpochUnixS + written_s;
}

uint32_t written_s_of(uint64_t unix_s) {
  return static_cast<uint32_t>(
      std::min<uint64_t>(unix_s > kOriginEpochUnixS ? unix_s - kOriginEpochUnixS : 0, ~uint32_t{0}));
}

// Rows, as a dictionary each.
nb::list writers(StoreServer& server) {
  const auto all = without_gil([&] { return server.store().writers(); });
  nb::list rows;
  for (const WriterUse& use : all) {
    nb::dict row;
    row["id"] = use.writer.id;
    row["instance"] = use.writer.instance;
    row["build"] = use.writer.build;
    row["started_unix_s"] = use.writer.started_unix_s;
    row["blocks"] = use.blocks;
    row["bytes"] = use.bytes;
    row["disk_blocks"] = use.disk_blocks;
    row["disk_bytes"] = use.disk_bytes;
    row["first_unix_s"] = unix_s_of(use.first_s);
    row["last_unix_s"] = unix_s_of(use.last_s);
    rows.append(row);
  }
  return rows;
}

// False: there is no place for it.
bool know_writer(StoreServer& server, uint64_t id, const std::string& instance, const std::string& build,
                 uint64_t started_unix_s) {
  const WriterNumber number = server.store().open_writer({id, instance, build, started_unix_s});
  server.store().close_writer(number);
  return number != 0;
}

std::vector<std::pair<uint64_t, uint64_t>> origins(StoreServer& server, TenantId tenant, nb::handle packed) {
  const std::vector<Key> keys = parse_keys(BufferView(packed));
  return without_gil([&] {
    std::vector<std::pair<uint64_t, uint64_t>> all;
    for (const Origin& one : server.store().origins(tenant, keys))
      all.emplace_back(one.writer, unix_s_of(one.written_s));
    return all;
  });
}

std::vector<int> set_origins(StoreServer& server, TenantId tenant, nb::handle packed,
                             const std::vector<std::pair<uint64_t, uint64_t>>& all) {
  const std::vector<Key> keys = parse_keys(BufferView(packed));
  if (keys.size() != all.size()) throw nb::value_error("as many origins as keys");
  return without_gil([&] {
    std::vector<int> codes;
    for (size_t at = 0; at < keys.size(); ++at) {
      const Origin origin{all[at].first, written_s_of(all[at].second)};
      codes.push_back(static_cast<int>(server.store().set_origin(tenant, keys[at], origin)));
    }
    return codes;
  });
}

std::map<std::string, uint64_t> recall(StoreServer& server, uint64_t writer, uint64_t cursor,
                                       uint64_t since_unix_s, uint64_t until_unix_s, bool dry_run,
                                       uint32_t refuse_s) {
  RecallRequest request;
  request.writer = writer;
  request.since_s = written_s_of(since_unix_s);
  if (until_unix_s != 0) request.until_s = written_s_of(until_unix_s);
  request.dry_run = dry_run;
  request.refuse_s = refuse_s;
  const Recalled done =
      without_gil([&] { return server.store().recall(request, cursor, StoreServer::now_ms()); });
  return {{"next_cursor", done.next_cursor},
          {"blocks", done.blocks},
          {"bytes", done.bytes},
          {"held_blocks", done.held_blocks},
          {"disk_blocks", done.disk_blocks},
          {"disk_bytes", done.disk_bytes},
          {"failed_blocks", done.failed_blocks}};
}

}  // namespace

void bind_writers(nb::class_<StoreServer>& bound) {
  bound.def("writers", &writers, "Who has blocks here, or is known by name. Writer 0: of no known writer.")
      .def("writers_refused", [](StoreServer& server) { return server.store().writers_refused(); })
      .def("know_writer", &know_writer, "id"_a, "instance"_a, "build"_a, "started_unix_s"_a,
           "Remembers what a writer has said of itself.")
      .def("origins", &origins, "tenant_id"_a, "keys"_a,
           "Of each block: its writer's id, and when it was written in seconds of Unix time; 0: unknown.")
      .def("set_origins", &set_origins, "tenant_id"_a, "keys"_a, "origins"_a,
           "Of copies: who wrote them first. A code for each.")
      .def("recall", &recall, "writer"_a, "cursor"_a, nb::kw_only(), "since_unix_s"_a = 0,
           "until_unix_s"_a = 0, "dry_run"_a = false, "refuse_s"_a = 0,
           "Removes a page of a writer's blocks for good; next_cursor 0: it was the last one.")
      .def(
          "lift", [](StoreServer& server, uint64_t writer) { server.store().lift(writer); }, "writer"_a,
          "What the writer writes becomes visible again; refuse_s of 4294967295 has no end before this "
          "call.");
}

}  // namespace mooncache::python
