#include "rdma/fake/network.h"

#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <utility>

namespace mooncache::testing {

namespace {
constexpr std::chrono::seconds kGatePatience{60};  // a test that fails must end
}

Network& network() {
  static Network one;
  return one;
}

Network::Network() {
  devices.resize(1);
  thread_ = std::thread([this] { run(); });
}

Network::~Network() {
  {
    const std::lock_guard lock(mutex);
    stopping_ = true;
  }
  changed.notify_all();
  thread_.join();
}

void Network::reset(uint32_t count) {
  const std::lock_guard lock(mutex);
  devices.assign(count, DeviceState{});
  faults.clear();
  flips = 0;
  repeats = false;
  invented.reset();
  dma_bufs.clear();
  for (const uint32_t key : kept) {
    delete by_key.at(key);
    by_key.erase(key);
  }
  kept.clear();
  for (const ibv_pd* domain : kept_domains) delete domain;
  kept_domains.clear();
  shuffled_ = false;
}

void Network::fail(const std::string& name, int error, int times, int skip) {
  const std::lock_guard lock(mutex);
  faults[name] = {error, times, skip};
}

int Network::fault(const std::string& name) {
  const auto found = faults.find(name);
  if (found == faults.end() || found->second.times == 0) return 0;
  if (found->second.skip > 0) {
    --found->second.skip;
    return 0;
  }
  if (found->second.times > 0) --found->second.times;
  return found->second.error;
}

void Network::hold(const std::string& name, int after) {
  const std::lock_guard lock(gate_mutex);
  gates[name] = {after, false};
  gate_changed.notify_all();
}

bool Network::wait_until_held(const std::string& name) {
  std::unique_lock lock(gate_mutex);
  return gate_changed.wait_for(lock, kGatePatience, [&] { return gates[name].held; });
}

void Network::pass_gate(const std::string& name) {
  std::unique_lock lock(gate_mutex);
  Gate& gate = gates[name];
  if (gate.left == 0) {
    gate.held = true;
    gate_changed.notify_all();
    (void)gate_changed.wait_for(lock, kGatePatience, [&] { return gate.left != 0; });
    gate.held = false;
  }
  if (gate.left > 0) --gate.left;
}

void Network::set_infiniband(uint32_t device) {
  const std::lock_guard lock(mutex);
  devices.at(device).infiniband = true;
}

void Network::say(uint32_t device, ibv_event_type what) {
  ibv_async_event event{};
  event.event_type = what;
  event.element.port_num = 1;
  for (FakeContext* context : contexts) {
    if (context->index == device) (void)!::write(context->event_pipe[1], &event, sizeof event);
  }
  changed.notify_all();
}

void Network::set_port_active(uint32_t device, bool active) {
  const std::lock_guard lock(mutex);
  devices.at(device).active = active;
  say(device, active ? IBV_EVENT_PORT_ACTIVE : IBV_EVENT_PORT_ERR);
}

void Network::set_address(uint32_t device, uint8_t last) {
  const std::lock_guard lock(mutex);
  devices.at(device).address = last;
  say(device, IBV_EVENT_GID_CHANGE);
}

void Network::set_dma_buf(int fd, void* memory, uint64_t size) {
  const std::lock_guard lock(mutex);
  dma_bufs.erase(fd);
  if (memory != nullptr) dma_bufs[fd] = {static_cast<std::byte*>(memory), size};
}

void Network::set_dma_buf_supported(uint32_t device, bool supported) {
  const std::lock_guard lock(mutex);
  devices.at(device).dma_buf = supported;
}

void Network::shuffle_reports(uint64_t seed) {
  const std::lock_guard lock(mutex);
  shuffled_ = true;
  random_.seed(seed);
}

void Network::set_latency_us(uint32_t device, uint32_t us) {
  const std::lock_guard lock(mutex);
  devices.at(device).latency_us = us;
}

void Network::set_mtu(uint32_t device, int mtu) {
  const std::lock_guard lock(mutex);
  devices.at(device).mtu = static_cast<ibv_mtu>(mtu);
}

void Network::cut_path(uint32_t device, bool cut) {
  const std::lock_guard lock(mutex);
  devices.at(device).cut = cut;
  changed.notify_all();
}

void Network::set_max_message(uint32_t device, uint32_t bytes) {
  const std::lock_guard lock(mutex);
  devices.at(device).max_message_bytes = bytes;
}

void Network::set_max_gather(uint32_t device, int ranges) {
  const std::lock_guard lock(mutex);
  devices.at(device).max_gather = ranges;
}

void Network::hang(uint32_t device, bool hung) {
  const std::lock_guard lock(mutex);
  devices.at(device).hung = hung;
  for (const auto& [number, qp] : queue_pairs) {
    if (qp->device == device && qp->state == IBV_QPS_ERR) flush(*qp);  // what it owes since it was stopped
  }
  changed.notify_all();
}

void Network::remove(uint32_t device) {
  const std::lock_guard lock(mutex);
  devices.at(device).removed = true;
  say(device, IBV_EVENT_DEVICE_FATAL);
}

void Network::repeat_report() {
  const std::lock_guard lock(mutex);
  repeats = true;
}

void Network::invent_report(uint64_t id) {
  const std::lock_guard lock(mutex);
  invented = id;
}

int Network::path_mtu(uint32_t device) const {
  const std::lock_guard lock(mutex);
  return devices.at(device).path_mtu;
}

void Network::flip_bits(uint32_t count) {
  const std::lock_guard lock(mutex);
  flips = count;
}

void Network::fail_after(uint32_t device, uint64_t requests_left) {
  const std::lock_guard lock(mutex);
  DeviceState& state = devices.at(device);
  state.fail_after = requests_left == 0 ? 0 : state.requests + requests_left;
}

uint64_t Network::bytes_moved(uint32_t device) const {
  const std::lock_guard lock(mutex);
  return devices.at(device).bytes;
}

uint64_t Network::requests(uint32_t device) const {
  const std::lock_guard lock(mutex);
  return devices.at(device).requests;
}

uint64_t Network::live_objects() const {
  const std::lock_guard lock(mutex);
  return objects;
}

uint64_t Network::registrations() const {
  const std::lock_guard lock(mutex);
  return by_key.size();
}

bool Network::has_kept_memory(const ibv_pd* pd) const {
  return std::any_of(kept.begin(), kept.end(), [&](uint32_t key) { return by_key.at(key)->mr.pd == pd; });
}

DeviceState& Network::state(const ibv_context* context) {
  return devices.at(reinterpret_cast<const FakeContext*>(context)->index);
}

void Network::complete(FakeQp& qp, uint64_t id, ibv_wc_status status) {
  auto* cq = reinterpret_cast<FakeCq*>(qp.qp.send_cq);
  ibv_wc entry{};
  entry.wr_id = id;
  entry.status = status;
  entry.qp_num = qp.qp.qp_num;
  cq->entries.push_back(entry);
  if (std::exchange(repeats, false)) cq->entries.push_back(entry);
  if (invented) {
    entry.wr_id = *std::exchange(invented, std::nullopt);
    cq->entries.push_back(entry);
  }
  if (!cq->armed || cq->cq.channel == nullptr) return;
  cq->armed = false;
  ibv_cq* which = &cq->cq;
  (void)!::write(reinterpret_cast<FakeChannel*>(cq->cq.channel)->write_fd, &which, sizeof which);
}

void Network::flush(FakeQp& qp) {
  if (devices.at(qp.device).hung) return;
  for (const FakeQp::Pending& pending : qp.pending) complete(qp, pending.request.wr_id, IBV_WC_WR_FLUSH_ERR);
  qp.pending.clear();
}

void Network::run() {
  std::unique_lock lock(mutex);
  while (!stopping_) {
    const auto now = std::chrono::steady_clock::now();
    if (execute_one(now)) {
      lock.unlock();  // whoever waits for the lock gets it between two requests
      std::this_thread::yield();
      lock.lock();
      continue;
    }
    auto next = now + std::chrono::milliseconds(20);
    for (const auto& [number, qp] : queue_pairs) {
      if (!qp->pending.empty() && !devices.at(qp->device).removed && !devices.at(qp->device).hung)
        next = std::min(next, qp->pending.front().due);
    }
    changed.wait_until(lock, next);
  }
}

// The queue pair whose first request is due longest; shuffled: any whose first request is due.
FakeQp* Network::next_to_run(std::chrono::steady_clock::time_point now) {
  std::vector<FakeQp*> ready;
  for (const auto& [number, qp] : queue_pairs) {
    if (qp->pending.empty() || qp->pending.front().due > now) continue;
    if (devices.at(qp->device).removed || devices.at(qp->device).hung) continue;
    ready.push_back(qp);
  }
  if (ready.empty()) return nullptr;
  if (shuffled_) return ready[random_() % ready.size()];
  return *std::min_element(ready.begin(), ready.end(), [](const FakeQp* a, const FakeQp* b) {
    return a->pending.front().due < b->pending.front().due;
  });
}

bool Network::execute_one(std::chrono::steady_clock::time_point now) {
  FakeQp* chosen = next_to_run(now);
  if (chosen == nullptr) return false;
  const FakeQp::Pending pending = std::move(chosen->pending.front());
  chosen->pending.pop_front();
  execute(*chosen, pending);
  return true;
}

void Network::execute(FakeQp& qp, const FakeQp::Pending& pending) {
  DeviceState& from = devices.at(qp.device);
  ++from.requests;
  if (from.fail_after != 0 && from.requests > from.fail_after) from.cut = true;
  const auto found = queue_pairs.find(qp.peer);
  ibv_wc_status status = IBV_WC_RETRY_EXC_ERR;
  if (found != queue_pairs.end() && found->second->state == IBV_QPS_RTS) {
    const DeviceState& to = devices.at(found->second->device);
    if (!from.active) {
      status = IBV_WC_LOC_QP_OP_ERR;
    } else if (pending.length > from.max_message_bytes) {
      status = IBV_WC_LOC_LEN_ERR;
    } else if (!from.cut && !to.cut && to.active && !to.removed) {
      status = move(qp, *found->second, pending);
    }
  }
  const bool signalled = (pending.request.send_flags & IBV_SEND_SIGNALED) != 0;
  if (signalled || status != IBV_WC_SUCCESS) complete(qp, pending.request.wr_id, status);
  if (status == IBV_WC_SUCCESS) return;
  qp.state = IBV_QPS_ERR;
  flush(qp);
  if (status == IBV_WC_REM_ACCESS_ERR) found->second->state = IBV_QPS_ERR;
}

// Where a piece of this side's memory is; null: its key does not say so.
std::byte* Network::local(const FakeQp& from, const ibv_sge& piece, bool write) const {
  const auto known = by_key.find(piece.lkey);
  if (known == by_key.end()) return nullptr;
  const FakeMr& memory = *known->second;
  if (memory.mr.pd != from.qp.pd || piece.addr < memory.iova || piece.length > memory.mr.length ||
      piece.addr - memory.iova > memory.mr.length - piece.length ||
      (!write && (memory.access & IBV_ACCESS_LOCAL_WRITE) == 0))
    return nullptr;
  return static_cast<std::byte*>(memory.mr.addr) + (piece.addr - memory.iova);
}

ibv_wc_status Network::move(FakeQp& from, FakeQp& to, const FakeQp::Pending& pending) {
  const ibv_send_wr& request = pending.request;
  const bool write = request.opcode == IBV_WR_RDMA_WRITE;
  const uint64_t length = pending.length;
  const auto remote = by_key.find(request.wr.rdma.rkey);
  const int needed = write ? IBV_ACCESS_REMOTE_WRITE : IBV_ACCESS_REMOTE_READ;
  const uint64_t address = request.wr.rdma.remote_addr;
  if (remote == by_key.end() || remote->second->mr.pd != to.qp.pd || (remote->second->access & needed) == 0 ||
      (to.access & needed) == 0 || address < remote->second->iova || length > remote->second->mr.length ||
      address - remote->second->iova > remote->second->mr.length - length) {
    return IBV_WC_REM_ACCESS_ERR;
  }
  auto* far = static_cast<std::byte*>(remote->second->mr.addr) + (address - remote->second->iova);
  if (!pending.copy.empty()) std::memcpy(far, pending.copy.data(), length);
  const bool flip = flips > 0 && length > 0;
  if (flip) --flips;
  uint64_t at = 0;
  for (const ibv_sge& piece : pending.pieces) {
    if (!pending.copy.empty()) break;
    std::byte* near = local(from, piece, write);
    if (near == nullptr) return IBV_WC_LOC_PROT_ERR;
    std::memcpy(write ? far + at : near, write ? near : far + at, piece.length);
    if (flip && !write && length / 2 - at < piece.length) near[length / 2 - at] ^= std::byte{1};
    at += piece.length;
  }
  if (flip && write) far[length / 2] ^= std::byte{1};
  devices.at(from.device).bytes += length;
  return IBV_WC_SUCCESS;
}

}  // namespace mooncache::testing
