#include "transport/rdma.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

#include "rdma/place.h"
#include "wire/rdma_address.h"

namespace mooncache {

const Capabilities& rdma_capabilities() {
  static const Capabilities capabilities = [] {
    Capabilities facts;
    facts.name = "rdma";
    facts.one_sided = true;
    facts.memory_kinds |= static_cast<uint8_t>(MemoryKind::kDevice);
    facts.max_slices = 65'536;
    facts.max_in_flight = 1024;
    return facts;
  }();
  return capabilities;
}

// Staging ----------------------------------------------------------------------------------------------

Result<std::unique_ptr<RdmaStaging>> RdmaStaging::create(uint64_t bytes) {
  const uint64_t slots = std::max<uint64_t>(bytes / kSlotBytes, 4);
  void* memory = mmap(nullptr, slots * kSlotBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    return {Code::kTransportUnavailable, "RDMA unavailable, because there is no memory for staging"};
  }
  (void)madvise(memory, slots * kSlotBytes, MADV_DONTFORK);
  return std::unique_ptr<RdmaStaging>(new RdmaStaging(static_cast<std::byte*>(memory), slots));
}

RdmaStaging::RdmaStaging(std::byte* data, uint64_t slots) : data_(data), slots_(slots) {
  for (uint64_t slot = slots; slot-- > 0;) free_.push_back(static_cast<uint32_t>(slot));
}

RdmaStaging::~RdmaStaging() {
  (void)munmap(data_, slots_ * kSlotBytes);
}

std::optional<uint32_t> RdmaStaging::acquire() {
  const std::lock_guard lock(mutex_);
  if (free_.empty()) return std::nullopt;
  const uint32_t slot = free_.back();
  free_.pop_back();
  return slot;
}

void RdmaStaging::release(uint32_t slot) {
  const std::lock_guard lock(mutex_);
  free_.push_back(slot);
}

std::shared_ptr<const RdmaRegion> RdmaShared::region(RegionHandle handle) {
  const std::lock_guard lock(mutex);
  const auto found = regions.find(handle);
  return found == regions.end() ? nullptr : found->second;
}

// ENDPOINT ---------------------------------------------------------------------------------------------

bool EndpointProgram::next(Request& request) {
  if (sent_) return false;
  sent_ = true;
  auto addresses = link_.prepare();
  if (!addresses) {  // nothing to ask the node; an empty list would be malformed
    status_ = addresses.status();
    answered_ = true;
    return false;
  }
  request.opcode = wire::Opcode::kEndpoint;
  wire::encode_items<wire::RdmaAddress>(request.meta, *addresses);
  return true;
}

Status EndpointProgram::on_response(const wire::FrameHeader&, const Status& status, Reader& in,
                                    PayloadSink&) {
  answered_ = true;
  status_ = status;
  if (!status) return Status::ok();
  const auto answers = wire::decode_items<wire::RdmaAddress>(in);
  if (!answers) return {Code::kProtocolError, "malformed ENDPOINT answer"};
  status_ = link_.connect(*answers);
  return Status::ok();
}

// The transport ----------------------------------------------------------------------------------------

rdma::RailLoad RdmaRail::load() const {
  return {rail->info().megabits_per_s, in_flight_bytes.load(std::memory_order_relaxed),
          links.load(std::memory_order_relaxed), false};
}

std::vector<bool> RdmaShared::near_rails() {
  const std::lock_guard lock(mutex);
  std::vector<bool> near(rails.size(), false);
  uint32_t count = 0;
  for (size_t i = 0; i < rails.size(); ++i) {
    near[i] = near_regions[i] > 0 && rails[i]->rail->up() && ++count <= config.rails_max;
  }
  return near;
}

// Another one for each process of a host and each transport of a process.
static size_t next_turn() {
  static std::atomic<size_t> transports{0};
  return static_cast<size_t>(getpid()) + transports.fetch_add(1, std::memory_order_relaxed);
}

RdmaTransport::RdmaTransport(const RdmaConfig& config, uint64_t staging_bytes)
    : availability_(open(config, staging_bytes)) {
  if (!availability_) shared_.reset();
}

Status RdmaTransport::open(const RdmaConfig& config, uint64_t staging_bytes) {
  if (!config.enabled) {
    return {Code::kTransportUnavailable, "RDMA unavailable, because the configuration switches it off"};
  }
  auto fabric = rdma::open_fabric(config);
  if (!fabric) return fabric.status();
  shared_ = std::make_shared<RdmaShared>();
  shared_->config = config;
  shared_->turn = next_turn();
  shared_->fabric = std::move(*fabric);
  auto staging = RdmaStaging::create(staging_bytes);
  if (!staging) return staging.status();
  shared_->staging = std::move(*staging);
  const auto ports = shared_->fabric->rails();
  int node = ports[shared_->turn % ports.size()]->info().numa_node;
  if (!rdma::has_several_nodes(config.sysfs_folder)) node = -1;
  (void)rdma::prefer_node(shared_->staging->memory(), node);
  Status last;
  for (const auto& rail : shared_->fabric->rails()) {
    auto used = std::make_unique<RdmaRail>();
    used->rail = rail;
    auto domain = rail->make_domain();
    if (domain) {
      used->domain = std::move(*domain);
      auto memory = used->domain->attach(shared_->staging->memory());
      if (memory) {
        used->staging = std::move(*memory);
        if (const uint32_t most = rail->info().max_message_bytes; most != 0) {
          uint32_t& common = shared_->max_message_bytes;
          common = common == 0 ? most : std::min(common, most);
        }
        shared_->max_gather = std::min(shared_->max_gather, rail->info().max_gather);
        shared_->rails.push_back(std::move(used));
        continue;
      }
      last = memory.status();
    } else {
      last = domain.status();
    }
  }
  if (shared_->rails.empty()) return last;
  std::vector<rdma::Distance> distances;
  for (const auto& rail : shared_->rails)
    distances.push_back(rdma::distance(rail->rail->info().numa_node, node));
  shared_->staging_slowness = rdma::slowness(distances);
  shared_->near_regions.assign(shared_->rails.size(), 0);
  return Status::ok();
}

Result<RegionHandle> RdmaTransport::register_region(const Region& region) {
  if (!availability_) return availability_;
  if (region.memory.data == nullptr || region.memory.size == 0) {
    return {Code::kInvalidArgument, "a region has at least one byte"};
  }
  auto made = std::make_shared<RdmaRegion>();
  if (Status status = attach(region, *made); !status) return status;
  const std::lock_guard lock(shared_->mutex);
  const RegionHandle handle = shared_->next_region++ | (made->device ? RdmaRegion::kDevice : 0);
  count_near(*made, true);
  shared_->regions[handle] = std::move(made);
  return handle;
}

// Host memory on every rail or none; device memory on the rails that reach it, which must be one at least.
Status RdmaTransport::attach(const Region& region, RdmaRegion& made) {
  made.memory = region.memory;
  made.device = region.kind == MemoryKind::kDevice;
  const rdma::DeviceRange device{reinterpret_cast<uint64_t>(region.memory.data), region.memory.size,
                                 region.dma_buf_fd, region.dma_buf_offset, region.no_dma_buf};
  bool reached = false;
  Status last;
  for (const auto& rail : shared_->rails) {
    auto memory = made.device ? rail->domain->attach_device(device) : rail->domain->attach(region.memory);
    if (!memory && !made.device) return memory.status();
    if (!memory) last = memory.status();
    reached = reached || memory;
    made.why_not.push_back(memory ? "" : memory.status().message);
    made.by_rail.push_back(memory ? std::move(*memory) : nullptr);
  }
  if (!reached) return last;
  measure(region, made);
  return Status::ok();
}

// After attaching: pages that were never touched have got their place by then.
void RdmaTransport::measure(const Region& region, RdmaRegion& made) const {
  rdma::PciPlace gpu;
  int node = region.numa_node;
  if (made.device && !region.pci_address.empty())
    gpu = rdma::place_of_address(shared_->config.sysfs_folder, region.pci_address);
  if (!made.device && node < 0) node = rdma::node_of_memory(region.memory);
  for (size_t i = 0; i < shared_->rails.size(); ++i) {
    const rdma::RailInfo& info = shared_->rails[i]->rail->info();
    const rdma::Distance known = made.device ? rdma::distance({info.pci_path, info.numa_node}, gpu)
                                             : rdma::distance(info.numa_node, node);
    made.distances.push_back(made.by_rail[i] ? known : rdma::Distance::kUnknown);
  }
  made.slowness = rdma::slowness(made.distances);
}

void RdmaTransport::count_near(const RdmaRegion& region, bool more) {
  for (size_t i = 0; region.device && i < region.slowness.size(); ++i) {
    if (region.slowness[i] == 1 && region.distances[i] != rdma::Distance::kUnknown)
      shared_->near_regions[i] += more ? 1u : -1u;
  }
}

std::string RdmaTransport::describe(RegionHandle handle) const {
  const auto region = availability_ ? shared_->region(handle) : nullptr;
  std::string text;
  for (size_t i = 0; region && i < region->by_rail.size(); ++i) {
    const rdma::RailInfo& info = shared_->rails[i]->rail->info();
    const auto& memory = region->by_rail[i];
    text += (text.empty() ? "" : "; ") + info.device + ":" + std::to_string(info.port) +
            (memory ? " by " + memory->how() : " not at all, because " + region->why_not[i]);
    if (memory && region->distances[i] != rdma::Distance::kUnknown)
      text += std::string(", ") + rdma::distance_name(region->distances[i]);
  }
  return text;
}

Status RdmaTransport::unregister_region(RegionHandle handle) {
  if (!availability_) return availability_;
  const std::lock_guard lock(shared_->mutex);
  const auto found = shared_->regions.find(handle);
  if (found == shared_->regions.end()) return {Code::kInvalidArgument, "no such region"};
  count_near(*found->second, false);
  shared_->regions.erase(found);
  return Status::ok();  // transfers under way keep it registered until they are over
}

Result<std::unique_ptr<RdmaLink>> RdmaTransport::make_link(Session& session) {
  if (!availability_) return availability_;
  if (!session.offers_rdma()) {
    return {Code::kTransportUnavailable, "RDMA unavailable, because the node does not offer it"};
  }
  return std::make_unique<RdmaLink>(shared_, &session);
}

Result<std::unique_ptr<Link>> RdmaTransport::connect(const PeerDescription& peer, Deadline deadline) {
  if (!availability_) return availability_;
  auto session = Session::connect(peer, Route::kTcp, deadline);
  if (!session) return session.status();
  if (!(*session)->offers_rdma()) {
    return {Code::kTransportUnavailable, "RDMA unavailable, because the node does not offer it"};
  }
  Session* raw = session->get();
  auto link = std::make_unique<RdmaLink>(shared_, raw, std::move(*session));
  EndpointProgram endpoint(*link);
  if (Status status = raw->run(endpoint, deadline); !status) return status;
  if (!endpoint.status()) return endpoint.status();
  return std::unique_ptr<Link>(std::move(link));
}

std::unique_ptr<Transport> make_rdma_transport() {
  return std::make_unique<RdmaTransport>(RdmaConfig{});
}

}  // namespace mooncache
