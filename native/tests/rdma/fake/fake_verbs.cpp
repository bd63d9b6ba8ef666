// A fake libibverbs: the calls that the data path binds, over the network in network.h. It keeps the
// rules that matter (keys, domains, ranges, access, states, queue depths) and can break in every way a test
// asks for. What is to be destroyed is gone also where the call is told to fail: nothing could be opened
// afterwards.
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "rdma/fake/network.h"

using namespace mooncache::testing;  // NOLINT: this file is the library

namespace {

using Lock = std::lock_guard<std::recursive_mutex>;

int fail_with(int error) {
  if (error != 0) errno = error;
  return error;
}

template <typename T>
T* refuse(int error) {
  errno = error;
  return nullptr;
}

void make_pipe(int* ends) {
  (void)!::pipe2(ends, O_CLOEXEC);
  (void)fcntl(ends[1], F_SETFL, O_NONBLOCK);
}

void fill_gid(uint32_t index, bool infiniband, uint8_t last, ibv_gid& gid) {
  std::memset(&gid, 0, sizeof gid);
  if (infiniband) {
    gid.raw[0] = 0xfe;
    gid.raw[1] = 0x80;
    gid.raw[15] = static_cast<uint8_t>(index + 1);
    return;
  }
  gid.raw[10] = gid.raw[11] = 0xff;
  gid.raw[12] = 10;
  gid.raw[13] = 77;
  gid.raw[14] = static_cast<uint8_t>(index);
  gid.raw[15] = last;
}

ibv_mr* enroll(Network& net, ibv_pd* pd, void* memory, size_t length, uint64_t iova, int access) {
  ++net.objects;
  auto* made = new FakeMr();
  made->mr.context = pd->context;
  made->mr.pd = pd;
  made->mr.addr = memory;
  made->mr.length = length;
  made->mr.lkey = made->mr.rkey = net.next_key;
  net.next_key += 0x101;
  made->iova = iova;
  made->access = access;
  net.by_key[made->mr.rkey] = made;
  return &made->mr;
}

int post_send(ibv_qp* handle, ibv_send_wr* requests, ibv_send_wr** bad) {
  Network& net = network();
  const Lock lock(net.mutex);
  auto* qp = reinterpret_cast<FakeQp*>(handle);
  const DeviceState& device = net.devices.at(qp->device);
  for (ibv_send_wr* request = requests; request != nullptr; request = request->next) {
    int error = net.fault("post_send");
    if (error == 0 && device.removed) error = EIO;
    if (error == 0 && qp->state != IBV_QPS_RTS && qp->state != IBV_QPS_ERR) error = EINVAL;
    if (error == 0 && qp->pending.size() >= qp->depth) error = ENOMEM;
    if (error == 0 && request->num_sge > static_cast<int>(qp->gathers)) error = EINVAL;
    if (error != 0) {
      *bad = request;
      return error;
    }
    if (qp->state == IBV_QPS_ERR) {
      net.complete(*qp, request->wr_id, IBV_WC_WR_FLUSH_ERR);
      continue;
    }
    FakeQp::Pending pending;
    pending.request = *request;
    for (int i = 0; i < request->num_sge; ++i) {
      const ibv_sge& piece = pending.pieces.emplace_back(request->sg_list[i]);
      pending.length += piece.length;
      const auto* from = reinterpret_cast<const std::byte*>(piece.addr);
      if ((request->send_flags & IBV_SEND_INLINE) != 0)
        pending.copy.insert(pending.copy.end(), from, from + piece.length);
    }
    pending.due = std::chrono::steady_clock::now() + std::chrono::microseconds(device.latency_us);
    qp->pending.push_back(std::move(pending));
  }
  net.changed.notify_all();
  return 0;
}

int poll_cq(ibv_cq* handle, int count, ibv_wc* found) {
  Network& net = network();
  const Lock lock(net.mutex);
  if (net.fault("poll_cq") != 0) return -1;
  auto* cq = reinterpret_cast<FakeCq*>(handle);
  int got = 0;
  while (got < count && !cq->entries.empty()) {
    found[got++] = cq->entries.front();
    cq->entries.pop_front();
  }
  return got;
}

int req_notify_cq(ibv_cq* handle, int) {
  Network& net = network();
  const Lock lock(net.mutex);
  if (const int error = net.fault("req_notify_cq")) return error;
  reinterpret_cast<FakeCq*>(handle)->armed = true;
  return 0;
}

}  // namespace

extern "C" {

FakeVerbs* mooncache_fake_verbs() {
  return &network();
}

// The same for tests that are not C++.
void mooncache_fake_dma_buf(int fd, void* memory, uint64_t size) {
  network().set_dma_buf(fd, memory, size);
}
void mooncache_fake_flip_bits(uint32_t count) {
  network().flip_bits(count);
}
void mooncache_fake_fail(const char* name, int error, int times, int skip) {
  network().fail(name, error, times, skip);
}
void mooncache_fake_cut_path(uint32_t device, int cut) {
  network().cut_path(device, cut != 0);
}

ibv_device** ibv_get_device_list(int* count) {
  Network& net = network();
  const Lock lock(net.mutex);
  if (const int error = net.fault("ibv_get_device_list")) return refuse<ibv_device*>(error);
  auto** list = static_cast<ibv_device**>(calloc(net.devices.size() + 1, sizeof(ibv_device*)));
  for (size_t i = 0; i < net.devices.size(); ++i) {
    auto* device = new FakeDevice();
    device->index = static_cast<uint32_t>(i);
    (void)snprintf(device->device.name, sizeof device->device.name, "fake%zu", i);
    list[i] = &device->device;
  }
  *count = static_cast<int>(net.devices.size());
  return list;
}

void ibv_free_device_list(ibv_device** list) {
  for (size_t i = 0; list[i] != nullptr; ++i) {
    delete reinterpret_cast<FakeDevice*>(list[i]);
  }
  free(list);
}

const char* ibv_get_device_name(ibv_device* device) {
  return device->name;
}

ibv_context* ibv_open_device(ibv_device* device) {
  Network& net = network();
  const Lock lock(net.mutex);
  if (const int error = net.fault("ibv_open_device")) return refuse<ibv_context>(error);
  auto* opened = new FakeContext();
  opened->index = reinterpret_cast<FakeDevice*>(device)->index;
  opened->context.device = new ibv_device(*device);
  make_pipe(opened->event_pipe);
  opened->context.async_fd = opened->event_pipe[0];
  opened->context.ops.post_send = post_send;
  opened->context.ops.poll_cq = poll_cq;
  opened->context.ops.req_notify_cq = req_notify_cq;
  net.contexts.insert(opened);
  return &opened->context;
}

int ibv_close_device(ibv_context* context) {
  Network& net = network();
  const Lock lock(net.mutex);
  auto* opened = reinterpret_cast<FakeContext*>(context);
  net.contexts.erase(opened);
  (void)::close(opened->event_pipe[0]);
  (void)::close(opened->event_pipe[1]);
  delete opened->context.device;
  delete opened;
  return fail_with(net.fault("ibv_close_device"));
}

int ibv_query_device(ibv_context* context, ibv_device_attr* facts) {
  Network& net = network();
  const Lock lock(net.mutex);
  if (const int error = net.fault("ibv_query_device")) return fail_with(error);
  std::memset(facts, 0, sizeof *facts);
  facts->phys_port_cnt = 1;
  facts->max_sge = facts->max_sge_rd = net.state(context).max_gather;
  facts->max_qp_rd_atom = facts->max_qp_init_rd_atom = 16;
  return 0;
}

int ibv_query_port(ibv_context* context, uint8_t, ibv_port_attr* port) {
  Network& net = network();
  const Lock lock(net.mutex);
  if (const int error = net.fault("ibv_query_port")) return fail_with(error);
  const DeviceState& device = net.state(context);
  port->state = device.active ? IBV_PORT_ACTIVE : IBV_PORT_DOWN;
  port->active_mtu = device.mtu;
  port->max_msg_sz = device.max_message_bytes;
  port->gid_tbl_len = 2;
  port->lid =
      static_cast<uint16_t>(device.infiniband ? reinterpret_cast<FakeContext*>(context)->index + 1 : 0);
  port->link_layer = device.infiniband ? IBV_LINK_LAYER_INFINIBAND : IBV_LINK_LAYER_ETHERNET;
  port->active_speed = 32;
  port->active_width = 2;
  return 0;
}

int _ibv_query_gid_ex(ibv_context* context, uint32_t port, uint32_t index, ibv_gid_entry* entry, uint32_t,
                      size_t) {
  Network& net = network();
  const Lock lock(net.mutex);
  if (const int error = net.fault("ibv_query_gid_ex")) return fail_with(error);
  const bool infiniband = net.state(context).infiniband;
  const uint8_t address = net.state(context).address;
  if (index != (infiniband ? 0u : 1u) || address == 0) return ENODATA;
  fill_gid(reinterpret_cast<FakeContext*>(context)->index, infiniband, address, entry->gid);
  entry->gid_index = index;
  entry->port_num = port;
  entry->gid_type = infiniband ? IBV_GID_TYPE_IB : IBV_GID_TYPE_ROCE_V2;
  return 0;
}

int ibv_get_async_event(ibv_context* context, ibv_async_event* event) {
  {
    const Lock lock(network().mutex);
    if (const int error = network().fault("ibv_get_async_event")) return fail_with(error);
  }
  return ::read(context->async_fd, event, sizeof *event) == static_cast<ssize_t>(sizeof *event) ? 0 : -1;
}

void ibv_ack_async_event(ibv_async_event*) {}

ibv_pd* ibv_alloc_pd(ibv_context* context) {
  Network& net = network();
  const Lock lock(net.mutex);
  if (const int error = net.fault("ibv_alloc_pd")) return refuse<ibv_pd>(error);
  ++net.objects;
  auto* pd = new ibv_pd();
  pd->context = context;
  return pd;
}

int ibv_dealloc_pd(ibv_pd* pd) {
  Network& net = network();
  const Lock lock(net.mutex);
  --net.objects;
  const int error = net.fault("ibv_dealloc_pd");
  // As a device does: a domain that has memory stays. A new one at the same address would open its keys
  // again.
  if (net.has_kept_memory(pd)) {
    net.kept_domains.push_back(pd);
    return fail_with(EBUSY);
  }
  delete pd;
  return fail_with(error);
}

ibv_mr* ibv_reg_mr_iova(ibv_pd* pd, void* memory, size_t length, uint64_t iova, int access) {
  Network& net = network();
  net.pass_gate("ibv_reg_mr_iova");
  const Lock lock(net.mutex);
  int error = net.fault("ibv_reg_mr_iova");
  if (error == 0 && net.state(pd->context).removed) error = EIO;
  if (error == 0 && (access & IBV_ACCESS_REMOTE_WRITE) != 0 && (access & IBV_ACCESS_LOCAL_WRITE) == 0)
    error = EINVAL;
  if (error == 0 && ((reinterpret_cast<uintptr_t>(memory) ^ iova) & 4095) != 0) error = EINVAL;
  // as nvidia-peermem does: the fake CUDA marks its addresses by this bit
  auto* pages = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(memory) & ~(uintptr_t{1} << 62));
  return error != 0 ? refuse<ibv_mr>(error) : enroll(net, pd, pages, length, iova, access);
}

ibv_mr* ibv_reg_dmabuf_mr(ibv_pd* pd, uint64_t offset, size_t length, uint64_t iova, int fd, int access) {
  Network& net = network();
  const Lock lock(net.mutex);
  int error = net.fault("ibv_reg_dmabuf_mr");
  if (error == 0 && net.state(pd->context).removed) error = EIO;
  if (error == 0 && !net.state(pd->context).dma_buf) error = EOPNOTSUPP;
  const auto found = net.dma_bufs.find(fd);
  if (error == 0 && found == net.dma_bufs.end()) error = EBADF;
  if (error == 0 && (offset > found->second.size || length > found->second.size - offset || length == 0))
    error = EINVAL;
  if (error == 0 && ((offset ^ iova) & 4095) != 0) error = EINVAL;
  if (error != 0) return refuse<ibv_mr>(error);
  return enroll(net, pd, found->second.memory + offset, length, iova, access);
}

int ibv_dereg_mr(ibv_mr* mr) {
  Network& net = network();
  net.pass_gate("ibv_dereg_mr");
  const Lock lock(net.mutex);
  --net.objects;
  const int error = net.fault("ibv_dereg_mr");
  if (error != 0) {  // the device knows it still
    net.kept.push_back(mr->rkey);
    return fail_with(error);
  }
  net.by_key.erase(mr->rkey);
  delete reinterpret_cast<FakeMr*>(mr);
  return 0;
}

ibv_comp_channel* ibv_create_comp_channel(ibv_context* context) {
  Network& net = network();
  const Lock lock(net.mutex);
  if (const int error = net.fault("ibv_create_comp_channel")) return refuse<ibv_comp_channel>(error);
  ++net.objects;
  auto* made = new FakeChannel();
  int ends[2];
  make_pipe(ends);
  made->channel.context = context;
  made->channel.fd = ends[0];
  made->write_fd = ends[1];
  return &made->channel;
}

int ibv_destroy_comp_channel(ibv_comp_channel* channel) {
  Network& net = network();
  const Lock lock(net.mutex);
  --net.objects;
  auto* made = reinterpret_cast<FakeChannel*>(channel);
  (void)::close(made->channel.fd);
  (void)::close(made->write_fd);
  delete made;
  return fail_with(net.fault("ibv_destroy_comp_channel"));
}

ibv_cq* ibv_create_cq(ibv_context* context, int, void* cq_context, ibv_comp_channel* channel, int) {
  Network& net = network();
  const Lock lock(net.mutex);
  if (const int error = net.fault("ibv_create_cq")) return refuse<ibv_cq>(error);
  ++net.objects;
  auto* made = new FakeCq();
  made->cq.context = context;
  made->cq.channel = channel;
  made->cq.cq_context = cq_context;
  return &made->cq;
}

int ibv_destroy_cq(ibv_cq* cq) {
  Network& net = network();
  const Lock lock(net.mutex);
  --net.objects;
  delete reinterpret_cast<FakeCq*>(cq);
  return fail_with(net.fault("ibv_destroy_cq"));
}

int ibv_get_cq_event(ibv_comp_channel* channel, ibv_cq** cq, void** context) {
  {
    const Lock lock(network().mutex);
    if (const int error = network().fault("ibv_get_cq_event")) return fail_with(error);
  }
  if (::read(channel->fd, cq, sizeof *cq) != static_cast<ssize_t>(sizeof *cq)) return -1;
  *context = (*cq)->cq_context;
  return 0;
}

void ibv_ack_cq_events(ibv_cq*, unsigned) {}

ibv_qp* ibv_create_qp(ibv_pd* pd, ibv_qp_init_attr* wish) {
  Network& net = network();
  net.pass_gate("ibv_create_qp");
  const Lock lock(net.mutex);
  if (const int error = net.fault("ibv_create_qp")) return refuse<ibv_qp>(error);
  ++net.objects;
  auto* made = new FakeQp();
  made->qp.context = pd->context;
  made->qp.pd = pd;
  made->qp.send_cq = wish->send_cq;
  made->qp.recv_cq = wish->recv_cq;
  made->qp.qp_num = net.next_number++;
  made->device = reinterpret_cast<FakeContext*>(pd->context)->index;
  made->depth = wish->cap.max_send_wr;
  made->gathers = wish->cap.max_send_sge;
  net.queue_pairs[made->qp.qp_num] = made;
  return &made->qp;
}

int ibv_modify_qp(ibv_qp* handle, ibv_qp_attr* wish, int mask) {
  Network& net = network();
  const Lock lock(net.mutex);
  int error = net.fault("ibv_modify_qp");
  if (error == 0 && net.state(handle->context).removed) error = EIO;
  auto* qp = reinterpret_cast<FakeQp*>(handle);
  const ibv_qp_state to = wish->qp_state;
  const bool in_order = to == IBV_QPS_ERR || (to == IBV_QPS_INIT && qp->state == IBV_QPS_RESET) ||
                        (to == IBV_QPS_RTR && qp->state == IBV_QPS_INIT) ||
                        (to == IBV_QPS_RTS && qp->state == IBV_QPS_RTR);
  if (error == 0 && !in_order) error = EINVAL;
  if (error != 0) return error;
  if ((mask & IBV_QP_ACCESS_FLAGS) != 0) qp->access = static_cast<int>(wish->qp_access_flags);
  if ((mask & IBV_QP_DEST_QPN) != 0) qp->peer = wish->dest_qp_num;
  if ((mask & IBV_QP_PATH_MTU) != 0) net.state(handle->context).path_mtu = wish->path_mtu;
  if ((mask & IBV_QP_RETRY_CNT) != 0) net.retry_count.store(wish->retry_cnt);
  qp->state = to;
  if (to == IBV_QPS_ERR) net.flush(*qp);
  return 0;
}

int ibv_destroy_qp(ibv_qp* handle) {
  Network& net = network();
  const Lock lock(net.mutex);
  --net.objects;
  net.queue_pairs.erase(handle->qp_num);
  delete reinterpret_cast<FakeQp*>(handle);
  return fail_with(net.fault("ibv_destroy_qp"));
}

}  // extern "C"
