// Which transports this build knows, best first. A new one is one line here.
#include "transport/rdma.h"
#include "transport/shm.h"

namespace mooncache {

namespace {

struct TransportEntry {
  const char* name;
  std::unique_ptr<Transport> (*make)();
};
constexpr TransportEntry kEntries[] = {
    {"shm", make_shm_transport}, {"rdma", make_rdma_transport}, {"tcp", make_tcp_transport}};

}  // namespace

std::vector<std::string> transport_names() {
  std::vector<std::string> names;
  for (const TransportEntry& entry : kEntries) names.emplace_back(entry.name);
  return names;
}

Result<std::unique_ptr<Transport>> make_transport(const std::string& name) {
  for (const TransportEntry& entry : kEntries) {
    if (name != entry.name) continue;
    auto transport = entry.make();
    if (Status status = transport->availability(); !status) return status;
    return transport;
  }
  std::string known;
  for (const TransportEntry& entry : kEntries) known += (known.empty() ? "" : ", ") + std::string(entry.name);
  return {Code::kInvalidArgument, "no transport \"" + name + "\"; this build has " + known};
}

std::vector<TransportReport> transport_report() {
  std::vector<TransportReport> report;
  for (const TransportEntry& entry : kEntries) {
    const Status status = entry.make()->availability();
    report.push_back({entry.name, status.is_ok(), status.message});
  }
  return report;
}

}  // namespace mooncache
