// The calls of libibverbs that the data path needs, bound at run time. Posting, polling and arming go
// through the table in the device's own context (abi.h), as they do in every verbs program.
#pragma once

#include <string>

#include "mooncache/status.h"
#include "rdma/abi.h"

namespace mooncache::rdma {

using namespace verbs;  // NOLINT: their names all begin with ibv_

struct Verbs {
  ibv_device** (*get_device_list)(int* count);
  void (*free_device_list)(ibv_device**);
  const char* (*get_device_name)(ibv_device*);
  ibv_context* (*open_device)(ibv_device*);
  int (*close_device)(ibv_context*);
  int (*query_device)(ibv_context*, ibv_device_attr*);
  int (*query_port)(ibv_context*, uint8_t port, ibv_port_attr*);
  int (*query_gid_ex)(ibv_context*, uint32_t port, uint32_t index, ibv_gid_entry*, uint32_t flags,
                      size_t entry_bytes);
  int (*get_async_event)(ibv_context*, ibv_async_event*);
  void (*ack_async_event)(ibv_async_event*);
  ibv_pd* (*alloc_pd)(ibv_context*);
  int (*dealloc_pd)(ibv_pd*);
  ibv_mr* (*reg_mr_iova)(ibv_pd*, void* address, size_t length, uint64_t iova, int access);
  // null before rdma-core 34: no dma-buf
  ibv_mr* (*reg_dmabuf_mr)(ibv_pd*, uint64_t offset, size_t length, uint64_t iova, int fd, int access);
  int (*dereg_mr)(ibv_mr*);
  ibv_comp_channel* (*create_comp_channel)(ibv_context*);
  int (*destroy_comp_channel)(ibv_comp_channel*);
  ibv_cq* (*create_cq)(ibv_context*, int entries, void* cq_context, ibv_comp_channel*, int vector);
  int (*destroy_cq)(ibv_cq*);
  int (*get_cq_event)(ibv_comp_channel*, ibv_cq**, void** cq_context);
  void (*ack_cq_events)(ibv_cq*, unsigned count);
  ibv_qp* (*create_qp)(ibv_pd*, ibv_qp_init_attr*);
  int (*modify_qp)(ibv_qp*, ibv_qp_attr*, int mask);
  int (*destroy_qp)(ibv_qp*);
};

// The table of the library at `path` (loaded once per path and kept), or the reason why there is none.
Result<const Verbs*> load_verbs(const std::string& path);

// TRANSPORT_UNAVAILABLE "RDMA unavailable, because <what>".
Status unavailable(const std::string& what);
// The same with what the call answered: verbs return the number, or set errno.
Status refused(const std::string& call, int error);

}  // namespace mooncache::rdma
