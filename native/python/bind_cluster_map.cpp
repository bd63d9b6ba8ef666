// The cluster map that a node hands out: the part of the class StoreServer that bind_store.cpp leaves to this
// file.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <array>

#include "calls.h"
#include "store_server.h"

using namespace nanobind::literals;

namespace mooncache::python {

namespace {

constexpr std::array<std::pair<const char*, NodeHealth>, 4> kStates = {{{"active", NodeHealth::kActive},
                                                                        {"suspect", NodeHealth::kSuspect},
                                                                        {"draining", NodeHealth::kDraining},
                                                                        {"dead", NodeHealth::kDead}}};

template <typename T>
void take(const nb::dict& from, const char* name, T& into) {
  if (!from.contains(name) || !nb::try_cast<T>(from[name], into))
    refuse(std::string(name) + " of a node in the map is missing, or is not of its kind");
}

NodeHealth state_of(const nb::dict& from) {
  std::string text;
  take(from, "state", text);
  for (const auto& [name, state] : kStates)
    if (text == name) return state;
  return NodeHealth::kSuspect;  // of a newer master
}

MapNode node_of(const nb::dict& from) {
  MapNode node;
  take(from, "index", node.index);
  take(from, "incarnation", node.incarnation);
  node.state = state_of(from);
  take(from, "rdma", node.rdma);
  take(from, "node_id", node.node_id);
  take(from, "host_id", node.host_id);
  take(from, "tcp_host", node.tcp_host);
  take(from, "tcp_port", node.tcp_port);
  take(from, "unix_path", node.unix_path);
  take(from, "arena", node.arena);
  take(from, "free_bytes", node.free_bytes);
  take(from, "weight", node.weight);
  take(from, "labels", node.labels);
  return node;
}

void set_cluster_map(StoreServer& server, uint64_t term, uint64_t epoch, const nb::list& nodes) {
  ClusterMap map{term, epoch, {}};
  map.nodes.reserve(nodes.size());
  for (nb::handle node : nodes) map.nodes.push_back(node_of(nb::cast<nb::dict>(node)));
  check(without_gil([&] { return server.set_cluster_map(map); }));
}

}  // namespace

void bind_cluster_map(nb::class_<StoreServer>& server) {
  server.def("set_cluster_map", &set_cluster_map, "term"_a, "epoch"_a, "nodes"_a,
             "What the node answers from now on when a peer asks which nodes there are.");
}

}  // namespace mooncache::python
