// The binary interface of libibverbs, as far as the data path uses it. Written here, so that every build has
// RDMA: no header of verbs has to be installed where the code is compiled, and the library is opened at run
// time (verbs.h). The names are those of verbs. tests/rdma/abi_test.cpp compares sizes, offsets and values
// with the headers of rdma-core where they are installed.
//
// The interface is frozen: rdma-core adds functions and bits, it moves nothing. Enumerations have a fixed
// type here, because a library newer than this file may report a value that it does not name.
#pragma once

#include <pthread.h>

#include <cstddef>
#include <cstdint>

namespace mooncache::verbs {

enum ibv_gid_type : uint32_t { IBV_GID_TYPE_IB, IBV_GID_TYPE_ROCE_V1, IBV_GID_TYPE_ROCE_V2 };

enum ibv_mtu : uint32_t {
  IBV_MTU_256 = 1,
  IBV_MTU_512,
  IBV_MTU_1024,
  IBV_MTU_2048,
  IBV_MTU_4096,
};

enum ibv_port_state : uint32_t { IBV_PORT_DOWN = 1, IBV_PORT_ACTIVE = 4 };

enum : uint8_t { IBV_LINK_LAYER_UNSPECIFIED, IBV_LINK_LAYER_INFINIBAND, IBV_LINK_LAYER_ETHERNET };

enum ibv_device_cap_flags : uint32_t {
  IBV_DEVICE_MEM_WINDOW = 1 << 17,
  IBV_DEVICE_MEM_MGT_EXTENSIONS = 1 << 21,
  IBV_DEVICE_MEM_WINDOW_TYPE_2A = 1 << 23,
  IBV_DEVICE_MEM_WINDOW_TYPE_2B = 1 << 24,
};

enum ibv_event_type : uint32_t {
  IBV_EVENT_DEVICE_FATAL = 8,
  IBV_EVENT_PORT_ACTIVE = 9,
  IBV_EVENT_PORT_ERR = 10,
  IBV_EVENT_GID_CHANGE = 18,
};

enum ibv_wc_status : uint32_t {
  IBV_WC_SUCCESS,
  IBV_WC_LOC_LEN_ERR,
  IBV_WC_LOC_QP_OP_ERR,
  IBV_WC_LOC_EEC_OP_ERR,
  IBV_WC_LOC_PROT_ERR,
  IBV_WC_WR_FLUSH_ERR,
  IBV_WC_MW_BIND_ERR,
  IBV_WC_BAD_RESP_ERR,
  IBV_WC_LOC_ACCESS_ERR,
  IBV_WC_REM_INV_REQ_ERR,
  IBV_WC_REM_ACCESS_ERR,
  IBV_WC_REM_OP_ERR,
  IBV_WC_RETRY_EXC_ERR,
  IBV_WC_RNR_RETRY_EXC_ERR,
};

enum ibv_access_flags : uint32_t {
  IBV_ACCESS_LOCAL_WRITE = 1,
  IBV_ACCESS_REMOTE_WRITE = 1 << 1,
  IBV_ACCESS_REMOTE_READ = 1 << 2,
  IBV_ACCESS_MW_BIND = 1 << 4,
  IBV_ACCESS_ZERO_BASED = 1 << 5,
  IBV_ACCESS_RELAXED_ORDERING = 1 << 20,  // taken by ibv_reg_mr_iova2 only
};

enum ibv_mw_type : uint32_t { IBV_MW_TYPE_1 = 1, IBV_MW_TYPE_2 = 2 };

enum ibv_qp_type : uint32_t { IBV_QPT_RC = 2 };

enum ibv_qp_state : uint32_t {
  IBV_QPS_RESET,
  IBV_QPS_INIT,
  IBV_QPS_RTR,
  IBV_QPS_RTS,
  IBV_QPS_SQD,
  IBV_QPS_SQE,
  IBV_QPS_ERR,
};

enum ibv_qp_attr_mask : int {
  IBV_QP_STATE = 1 << 0,
  IBV_QP_ACCESS_FLAGS = 1 << 3,
  IBV_QP_PKEY_INDEX = 1 << 4,
  IBV_QP_PORT = 1 << 5,
  IBV_QP_AV = 1 << 7,
  IBV_QP_PATH_MTU = 1 << 8,
  IBV_QP_TIMEOUT = 1 << 9,
  IBV_QP_RETRY_CNT = 1 << 10,
  IBV_QP_RNR_RETRY = 1 << 11,
  IBV_QP_RQ_PSN = 1 << 12,
  IBV_QP_MAX_QP_RD_ATOMIC = 1 << 13,
  IBV_QP_MIN_RNR_TIMER = 1 << 15,
  IBV_QP_SQ_PSN = 1 << 16,
  IBV_QP_MAX_DEST_RD_ATOMIC = 1 << 17,
  IBV_QP_DEST_QPN = 1 << 20,
};

enum ibv_wr_opcode : uint32_t {
  IBV_WR_RDMA_WRITE = 0,
  IBV_WR_RDMA_READ = 4,
  IBV_WR_LOCAL_INV = 7,
  IBV_WR_BIND_MW = 8,
};

enum ibv_send_flags : uint32_t { IBV_SEND_FENCE = 1, IBV_SEND_SIGNALED = 1 << 1, IBV_SEND_INLINE = 1 << 3 };

struct ibv_context;
struct ibv_cq;
struct ibv_qp;
struct ibv_srq;

union ibv_gid {
  uint8_t raw[16];
  struct {
    uint64_t subnet_prefix, interface_id;  // big-endian
  } global;
};

struct ibv_gid_entry {
  ibv_gid gid;
  uint32_t gid_index;
  uint32_t port_num;
  uint32_t gid_type;
  uint32_t ndev_ifindex;
};

struct ibv_device {
  void (*unused[2])();
  int32_t node_type;
  int32_t transport_type;
  char name[64];
  char dev_name[64];
  char dev_path[256];
  char ibdev_path[256];
};

struct ibv_device_attr {
  char fw_ver[64];
  uint64_t node_guid, sys_image_guid;  // big-endian
  uint64_t max_mr_size, page_size_cap;
  uint32_t vendor_id, vendor_part_id, hw_ver;
  int max_qp, max_qp_wr;
  uint32_t device_cap_flags;
  int max_sge, max_sge_rd, max_cq, max_cqe, max_mr, max_pd;
  int max_qp_rd_atom, max_ee_rd_atom, max_res_rd_atom, max_qp_init_rd_atom, max_ee_init_rd_atom;
  uint32_t atomic_cap;
  int max_ee, max_rdd, max_mw, max_raw_ipv6_qp, max_raw_ethy_qp;
  int max_mcast_grp, max_mcast_qp_attach, max_total_mcast_qp_attach;
  int max_ah, max_fmr, max_map_per_fmr, max_srq, max_srq_wr, max_srq_sge;
  uint16_t max_pkeys;
  uint8_t local_ca_ack_delay, phys_port_cnt;
};

// The function ibv_query_port of the library writes all but the last field.
struct ibv_port_attr {
  ibv_port_state state;
  ibv_mtu max_mtu, active_mtu;
  int gid_tbl_len;
  uint32_t port_cap_flags, max_msg_sz, bad_pkey_cntr, qkey_viol_cntr;
  uint16_t pkey_tbl_len, lid, sm_lid;
  uint8_t lmc, max_vl_num, sm_sl, subnet_timeout, init_type_reply;
  uint8_t active_width, active_speed, phys_state, link_layer, flags;
  uint16_t port_cap_flags2;
};

struct ibv_async_event {
  union {
    ibv_cq* cq;
    ibv_qp* qp;
    int port_num;
  } element;
  ibv_event_type event_type;
};

struct ibv_pd {
  ibv_context* context;
  uint32_t handle;
};

struct ibv_mr {
  ibv_context* context;
  ibv_pd* pd;
  void* addr;
  size_t length;
  uint32_t handle, lkey, rkey;
};

struct ibv_mw {
  ibv_context* context;
  ibv_pd* pd;
  uint32_t rkey, handle;
  ibv_mw_type type;
};

struct ibv_mw_bind_info {
  ibv_mr* mr;
  uint64_t addr, length;
  uint32_t mw_access_flags;
};

struct ibv_mw_bind {
  uint64_t wr_id;
  uint32_t send_flags;
  ibv_mw_bind_info bind_info;
};

struct ibv_global_route {
  ibv_gid dgid;
  uint32_t flow_label;
  uint8_t sgid_index, hop_limit, traffic_class;
};

struct ibv_ah_attr {
  ibv_global_route grh;
  uint16_t dlid;
  uint8_t sl, src_path_bits, static_rate, is_global, port_num;
};

struct ibv_qp_cap {
  uint32_t max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data;
};

struct ibv_qp_init_attr {
  void* qp_context;
  ibv_cq *send_cq, *recv_cq;
  ibv_srq* srq;
  ibv_qp_cap cap;
  ibv_qp_type qp_type;
  int sq_sig_all;
};

struct ibv_qp_attr {
  ibv_qp_state qp_state, cur_qp_state;
  ibv_mtu path_mtu;
  uint32_t path_mig_state;
  uint32_t qkey, rq_psn, sq_psn, dest_qp_num, qp_access_flags;
  ibv_qp_cap cap;
  ibv_ah_attr ah_attr, alt_ah_attr;
  uint16_t pkey_index, alt_pkey_index;
  uint8_t en_sqd_async_notify, sq_draining, max_rd_atomic, max_dest_rd_atomic, min_rnr_timer;
  uint8_t port_num, timeout, retry_cnt, rnr_retry, alt_port_num, alt_timeout;
  uint32_t rate_limit;
};

struct ibv_sge {
  uint64_t addr;
  uint32_t length, lkey;
};

struct ibv_send_wr {
  uint64_t wr_id;
  ibv_send_wr* next;
  ibv_sge* sg_list;
  int num_sge;
  ibv_wr_opcode opcode;
  uint32_t send_flags;
  union {
    uint32_t imm_data;  // big-endian
    uint32_t invalidate_rkey;
  };
  union {
    struct {
      uint64_t remote_addr;
      uint32_t rkey;
    } rdma;
    struct {
      uint64_t remote_addr, compare_add, swap;
      uint32_t rkey;
    } atomic;
  } wr;
  union {
    struct {
      uint32_t remote_srqn;
    } xrc;
  } qp_type;
  union {
    struct {
      ibv_mw* mw;
      uint32_t rkey;
      ibv_mw_bind_info bind_info;
    } bind_mw;
  };
};

struct ibv_wc {
  uint64_t wr_id;
  ibv_wc_status status;
  uint32_t opcode, vendor_err, byte_len;
  union {
    uint32_t imm_data;  // big-endian
    uint32_t invalidated_rkey;
  };
  uint32_t qp_num, src_qp, wc_flags;
  uint16_t pkey_index, slid;
  uint8_t sl, dlid_path_bits;
};

struct ibv_comp_channel {
  ibv_context* context;
  int fd, refcnt;
};

struct ibv_cq {
  ibv_context* context;
  ibv_comp_channel* channel;
  void* cq_context;
  uint32_t handle;
  int cqe;
  pthread_mutex_t mutex;
  pthread_cond_t cond;
  uint32_t comp_events_completed, async_events_completed;
};

struct ibv_qp {
  ibv_context* context;
  void* qp_context;
  ibv_pd* pd;
  ibv_cq *send_cq, *recv_cq;
  ibv_srq* srq;
  uint32_t handle, qp_num;
  ibv_qp_state state;
  ibv_qp_type qp_type;
  pthread_mutex_t mutex;
  pthread_cond_t cond;
  uint32_t events_completed;
};

// What a driver fills in when its device is opened. Calls without a name here are reached through the
// library.
struct ibv_context_ops {
  void (*through_the_library[7])();
  ibv_mw* (*alloc_mw)(ibv_pd*, ibv_mw_type);
  int (*bind_mw)(ibv_qp*, ibv_mw*, ibv_mw_bind*);
  int (*dealloc_mw)(ibv_mw*);
  void (*create_cq)();
  int (*poll_cq)(ibv_cq*, int, ibv_wc*);
  int (*req_notify_cq)(ibv_cq*, int);
  void (*of_queues[12])();
  int (*post_send)(ibv_qp*, ibv_send_wr*, ibv_send_wr**);
  void (*post_recv)();
  void (*of_addresses[5])();
};

struct ibv_context {
  ibv_device* device;
  ibv_context_ops ops;
  int cmd_fd, async_fd, num_comp_vectors;
  pthread_mutex_t mutex;
  void* abi_compat;
};

inline int ibv_poll_cq(ibv_cq* cq, int count, ibv_wc* found) {
  return cq->context->ops.poll_cq(cq, count, found);
}
inline int ibv_req_notify_cq(ibv_cq* cq, int solicited_only) {
  return cq->context->ops.req_notify_cq(cq, solicited_only);
}
inline int ibv_post_send(ibv_qp* qp, ibv_send_wr* requests, ibv_send_wr** bad) {
  return qp->context->ops.post_send(qp, requests, bad);
}

}  // namespace mooncache::verbs
