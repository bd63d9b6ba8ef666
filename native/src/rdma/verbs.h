// The calls of libibverbs that the data path needs, bound at run time. Posting, polling and arming go
// through the table in the device's own context (inline functions of the headers), as they do in every
// verbs program. Only this folder includes the headers of verbs.
#pragma once

#include <infiniband/verbs.h>

#include <string>

#include "mooncache/status.h"

namespace mooncache::rdma {

struct Verbs {
  decltype(&::ibv_get_device_list) get_device_list;
  decltype(&::ibv_free_device_list) free_device_list;
  decltype(&::ibv_get_device_name) get_device_name;
  decltype(&::ibv_open_device) open_device;
  decltype(&::ibv_close_device) close_device;
  decltype(&::ibv_query_device) query_device;
  int (*query_port)(ibv_context*, uint8_t, _compat_ibv_port_attr*);
  decltype(&::_ibv_query_gid_ex) query_gid_ex;
  decltype(&::ibv_get_async_event) get_async_event;
  decltype(&::ibv_ack_async_event) ack_async_event;
  decltype(&::ibv_alloc_pd) alloc_pd;
  decltype(&::ibv_dealloc_pd) dealloc_pd;
  ibv_mr* (*reg_mr_iova)(ibv_pd*, void*, size_t, uint64_t, int);
  // null before rdma-core 34: no dma-buf
  ibv_mr* (*reg_dmabuf_mr)(ibv_pd*, uint64_t offset, size_t length, uint64_t iova, int fd, int access);
  decltype(&::ibv_dereg_mr) dereg_mr;
  decltype(&::ibv_create_comp_channel) create_comp_channel;
  decltype(&::ibv_destroy_comp_channel) destroy_comp_channel;
  ibv_cq* (*create_cq)(ibv_context*, int, void*, ibv_comp_channel*, int);
  decltype(&::ibv_destroy_cq) destroy_cq;
  decltype(&::ibv_get_cq_event) get_cq_event;
  decltype(&::ibv_ack_cq_events) ack_cq_events;
  ibv_qp* (*create_qp)(ibv_pd*, ibv_qp_init_attr*);
  decltype(&::ibv_modify_qp) modify_qp;
  decltype(&::ibv_destroy_qp) destroy_qp;
};

// The table of the library at `path` (loaded once per path and kept), or the reason why there is none.
Result<const Verbs*> load_verbs(const std::string& path);

// TRANSPORT_UNAVAILABLE "RDMA unavailable, because <what>".
Status unavailable(const std::string& what);
// The same with what the call answered: verbs return the number, or set errno.
Status refused(const std::string& call, int error);

}  // namespace mooncache::rdma
