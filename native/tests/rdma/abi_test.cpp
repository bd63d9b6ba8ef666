// rdma/abi.h against the headers of rdma-core, where they are installed (Debian package libibverbs-dev). This
// file alone includes them.
#include "rdma/abi.h"

#include <gtest/gtest.h>

#if __has_include(<infiniband/verbs.h>)
#include <infiniband/verbs.h>

#include <type_traits>

namespace {

namespace ours = mooncache::verbs;

#define SAME_SIZE(type) EXPECT_EQ(sizeof(ours::type), sizeof(::type)) << #type
#define SAME_PLACE(type, member)                                                              \
  EXPECT_EQ(offsetof(ours::type, member), offsetof(::type, member)) << #type "." #member;     \
  EXPECT_EQ(sizeof(std::declval<ours::type>().member), sizeof(std::declval<::type>().member)) \
      << #type "." #member
#define SAME_VALUE(name) EXPECT_EQ(static_cast<int64_t>(ours::name), static_cast<int64_t>(::name)) << #name

TEST(Abi, StructuresHaveTheSizesOfRdmaCore) {
  SAME_SIZE(ibv_gid);
  SAME_SIZE(ibv_gid_entry);
  SAME_SIZE(ibv_device);
  SAME_SIZE(ibv_device_attr);
  SAME_SIZE(ibv_port_attr);
  SAME_SIZE(ibv_async_event);
  SAME_SIZE(ibv_pd);
  SAME_SIZE(ibv_mr);
  SAME_SIZE(ibv_mw);
  SAME_SIZE(ibv_mw_bind_info);
  SAME_SIZE(ibv_mw_bind);
  SAME_SIZE(ibv_global_route);
  SAME_SIZE(ibv_ah_attr);
  SAME_SIZE(ibv_qp_cap);
  SAME_SIZE(ibv_qp_init_attr);
  SAME_SIZE(ibv_qp_attr);
  SAME_SIZE(ibv_sge);
  SAME_SIZE(ibv_send_wr);
  SAME_SIZE(ibv_wc);
  SAME_SIZE(ibv_comp_channel);
  SAME_SIZE(ibv_cq);
  SAME_SIZE(ibv_qp);
  SAME_SIZE(ibv_context_ops);
  SAME_SIZE(ibv_context);
}

TEST(Abi, WhatADeviceTellsLiesWhereRdmaCoreHasIt) {
  SAME_PLACE(ibv_gid_entry, gid);
  SAME_PLACE(ibv_gid_entry, gid_index);
  SAME_PLACE(ibv_gid_entry, port_num);
  SAME_PLACE(ibv_gid_entry, gid_type);
  SAME_PLACE(ibv_gid_entry, ndev_ifindex);
  SAME_PLACE(ibv_device, node_type);
  SAME_PLACE(ibv_device, transport_type);
  SAME_PLACE(ibv_device, name);
  SAME_PLACE(ibv_device, dev_name);
  SAME_PLACE(ibv_device, dev_path);
  SAME_PLACE(ibv_device, ibdev_path);
  SAME_PLACE(ibv_device_attr, max_mr_size);
  SAME_PLACE(ibv_device_attr, max_qp);
  SAME_PLACE(ibv_device_attr, device_cap_flags);
  SAME_PLACE(ibv_device_attr, max_mr);
  SAME_PLACE(ibv_device_attr, max_qp_rd_atom);
  SAME_PLACE(ibv_device_attr, max_qp_init_rd_atom);
  SAME_PLACE(ibv_device_attr, atomic_cap);
  SAME_PLACE(ibv_device_attr, max_mw);
  SAME_PLACE(ibv_device_attr, max_srq_sge);
  SAME_PLACE(ibv_device_attr, max_pkeys);
  SAME_PLACE(ibv_device_attr, phys_port_cnt);
  SAME_PLACE(ibv_port_attr, state);
  SAME_PLACE(ibv_port_attr, max_mtu);
  SAME_PLACE(ibv_port_attr, active_mtu);
  SAME_PLACE(ibv_port_attr, gid_tbl_len);
  SAME_PLACE(ibv_port_attr, max_msg_sz);
  SAME_PLACE(ibv_port_attr, lid);
  SAME_PLACE(ibv_port_attr, active_width);
  SAME_PLACE(ibv_port_attr, active_speed);
  SAME_PLACE(ibv_port_attr, phys_state);
  SAME_PLACE(ibv_port_attr, link_layer);
  SAME_PLACE(ibv_port_attr, flags);
  SAME_PLACE(ibv_port_attr, port_cap_flags2);
  SAME_PLACE(ibv_async_event, element);
  SAME_PLACE(ibv_async_event, event_type);
}

TEST(Abi, MemoryLiesWhereRdmaCoreHasIt) {
  SAME_PLACE(ibv_pd, context);
  SAME_PLACE(ibv_pd, handle);
  SAME_PLACE(ibv_mr, context);
  SAME_PLACE(ibv_mr, pd);
  SAME_PLACE(ibv_mr, addr);
  SAME_PLACE(ibv_mr, length);
  SAME_PLACE(ibv_mr, handle);
  SAME_PLACE(ibv_mr, lkey);
  SAME_PLACE(ibv_mr, rkey);
  SAME_PLACE(ibv_mw, pd);
  SAME_PLACE(ibv_mw, rkey);
  SAME_PLACE(ibv_mw, handle);
  SAME_PLACE(ibv_mw, type);
  SAME_PLACE(ibv_mw_bind_info, mr);
  SAME_PLACE(ibv_mw_bind_info, addr);
  SAME_PLACE(ibv_mw_bind_info, length);
  SAME_PLACE(ibv_mw_bind_info, mw_access_flags);
  SAME_PLACE(ibv_mw_bind, wr_id);
  SAME_PLACE(ibv_mw_bind, send_flags);
  SAME_PLACE(ibv_mw_bind, bind_info);
}

TEST(Abi, ConnectionsLieWhereRdmaCoreHasThem) {
  SAME_PLACE(ibv_global_route, dgid);
  SAME_PLACE(ibv_global_route, flow_label);
  SAME_PLACE(ibv_global_route, sgid_index);
  SAME_PLACE(ibv_global_route, hop_limit);
  SAME_PLACE(ibv_global_route, traffic_class);
  SAME_PLACE(ibv_ah_attr, grh);
  SAME_PLACE(ibv_ah_attr, dlid);
  SAME_PLACE(ibv_ah_attr, sl);
  SAME_PLACE(ibv_ah_attr, src_path_bits);
  SAME_PLACE(ibv_ah_attr, static_rate);
  SAME_PLACE(ibv_ah_attr, is_global);
  SAME_PLACE(ibv_ah_attr, port_num);
  SAME_PLACE(ibv_qp_cap, max_send_wr);
  SAME_PLACE(ibv_qp_cap, max_recv_wr);
  SAME_PLACE(ibv_qp_cap, max_send_sge);
  SAME_PLACE(ibv_qp_cap, max_recv_sge);
  SAME_PLACE(ibv_qp_cap, max_inline_data);
  SAME_PLACE(ibv_qp_init_attr, qp_context);
  SAME_PLACE(ibv_qp_init_attr, send_cq);
  SAME_PLACE(ibv_qp_init_attr, recv_cq);
  SAME_PLACE(ibv_qp_init_attr, srq);
  SAME_PLACE(ibv_qp_init_attr, cap);
  SAME_PLACE(ibv_qp_init_attr, qp_type);
  SAME_PLACE(ibv_qp_init_attr, sq_sig_all);
  SAME_PLACE(ibv_qp_attr, qp_state);
  SAME_PLACE(ibv_qp_attr, cur_qp_state);
  SAME_PLACE(ibv_qp_attr, path_mtu);
  SAME_PLACE(ibv_qp_attr, path_mig_state);
  SAME_PLACE(ibv_qp_attr, rq_psn);
  SAME_PLACE(ibv_qp_attr, sq_psn);
  SAME_PLACE(ibv_qp_attr, dest_qp_num);
  SAME_PLACE(ibv_qp_attr, qp_access_flags);
  SAME_PLACE(ibv_qp_attr, cap);
  SAME_PLACE(ibv_qp_attr, ah_attr);
  SAME_PLACE(ibv_qp_attr, alt_ah_attr);
  SAME_PLACE(ibv_qp_attr, pkey_index);
  SAME_PLACE(ibv_qp_attr, max_rd_atomic);
  SAME_PLACE(ibv_qp_attr, max_dest_rd_atomic);
  SAME_PLACE(ibv_qp_attr, min_rnr_timer);
  SAME_PLACE(ibv_qp_attr, port_num);
  SAME_PLACE(ibv_qp_attr, timeout);
  SAME_PLACE(ibv_qp_attr, retry_cnt);
  SAME_PLACE(ibv_qp_attr, rnr_retry);
  SAME_PLACE(ibv_qp_attr, rate_limit);
  SAME_PLACE(ibv_comp_channel, context);
  SAME_PLACE(ibv_comp_channel, fd);
  SAME_PLACE(ibv_cq, context);
  SAME_PLACE(ibv_cq, channel);
  SAME_PLACE(ibv_cq, cq_context);
  SAME_PLACE(ibv_cq, cqe);
  SAME_PLACE(ibv_cq, mutex);
  SAME_PLACE(ibv_cq, cond);
  SAME_PLACE(ibv_cq, async_events_completed);
  SAME_PLACE(ibv_qp, context);
  SAME_PLACE(ibv_qp, qp_context);
  SAME_PLACE(ibv_qp, pd);
  SAME_PLACE(ibv_qp, send_cq);
  SAME_PLACE(ibv_qp, recv_cq);
  SAME_PLACE(ibv_qp, srq);
  SAME_PLACE(ibv_qp, handle);
  SAME_PLACE(ibv_qp, qp_num);
  SAME_PLACE(ibv_qp, state);
  SAME_PLACE(ibv_qp, qp_type);
  SAME_PLACE(ibv_qp, mutex);
  SAME_PLACE(ibv_qp, events_completed);
}

TEST(Abi, RequestsAndReportsLieWhereRdmaCoreHasThem) {
  SAME_PLACE(ibv_sge, addr);
  SAME_PLACE(ibv_sge, length);
  SAME_PLACE(ibv_sge, lkey);
  SAME_PLACE(ibv_send_wr, wr_id);
  SAME_PLACE(ibv_send_wr, next);
  SAME_PLACE(ibv_send_wr, sg_list);
  SAME_PLACE(ibv_send_wr, num_sge);
  SAME_PLACE(ibv_send_wr, opcode);
  SAME_PLACE(ibv_send_wr, send_flags);
  SAME_PLACE(ibv_send_wr, imm_data);
  SAME_PLACE(ibv_send_wr, invalidate_rkey);
  SAME_PLACE(ibv_send_wr, wr.rdma.remote_addr);
  SAME_PLACE(ibv_send_wr, wr.rdma.rkey);
  SAME_PLACE(ibv_send_wr, qp_type.xrc.remote_srqn);
  SAME_PLACE(ibv_send_wr, bind_mw.mw);
  SAME_PLACE(ibv_send_wr, bind_mw.rkey);
  SAME_PLACE(ibv_send_wr, bind_mw.bind_info);
  SAME_PLACE(ibv_wc, wr_id);
  SAME_PLACE(ibv_wc, status);
  SAME_PLACE(ibv_wc, opcode);
  SAME_PLACE(ibv_wc, vendor_err);
  SAME_PLACE(ibv_wc, byte_len);
  SAME_PLACE(ibv_wc, imm_data);
  SAME_PLACE(ibv_wc, qp_num);
  SAME_PLACE(ibv_wc, wc_flags);
  SAME_PLACE(ibv_wc, dlid_path_bits);
}

// The calls that go straight to the driver.
TEST(Abi, TheTableOfADeviceHasItsCallsWhereRdmaCoreHasThem) {
  SAME_PLACE(ibv_context_ops, alloc_mw);
  SAME_PLACE(ibv_context_ops, bind_mw);
  SAME_PLACE(ibv_context_ops, dealloc_mw);
  SAME_PLACE(ibv_context_ops, poll_cq);
  SAME_PLACE(ibv_context_ops, req_notify_cq);
  SAME_PLACE(ibv_context_ops, post_send);
  SAME_PLACE(ibv_context_ops, post_recv);
  SAME_PLACE(ibv_context, device);
  SAME_PLACE(ibv_context, ops);
  SAME_PLACE(ibv_context, cmd_fd);
  SAME_PLACE(ibv_context, async_fd);
  SAME_PLACE(ibv_context, num_comp_vectors);
  SAME_PLACE(ibv_context, mutex);
  SAME_PLACE(ibv_context, abi_compat);
}

TEST(Abi, NumbersOfDevicesAndMemoryAreThoseOfRdmaCore) {
  SAME_VALUE(IBV_GID_TYPE_IB);
  SAME_VALUE(IBV_GID_TYPE_ROCE_V1);
  SAME_VALUE(IBV_GID_TYPE_ROCE_V2);
  SAME_VALUE(IBV_MTU_256);
  SAME_VALUE(IBV_MTU_512);
  SAME_VALUE(IBV_MTU_1024);
  SAME_VALUE(IBV_MTU_2048);
  SAME_VALUE(IBV_MTU_4096);
  SAME_VALUE(IBV_PORT_DOWN);
  SAME_VALUE(IBV_PORT_ACTIVE);
  SAME_VALUE(IBV_LINK_LAYER_UNSPECIFIED);
  SAME_VALUE(IBV_LINK_LAYER_INFINIBAND);
  SAME_VALUE(IBV_LINK_LAYER_ETHERNET);
  SAME_VALUE(IBV_DEVICE_MEM_WINDOW);
  SAME_VALUE(IBV_DEVICE_MEM_MGT_EXTENSIONS);
  SAME_VALUE(IBV_DEVICE_MEM_WINDOW_TYPE_2A);
  SAME_VALUE(IBV_DEVICE_MEM_WINDOW_TYPE_2B);
  SAME_VALUE(IBV_EVENT_DEVICE_FATAL);
  SAME_VALUE(IBV_EVENT_PORT_ACTIVE);
  SAME_VALUE(IBV_EVENT_PORT_ERR);
  SAME_VALUE(IBV_EVENT_GID_CHANGE);
  SAME_VALUE(IBV_ACCESS_LOCAL_WRITE);
  SAME_VALUE(IBV_ACCESS_REMOTE_WRITE);
  SAME_VALUE(IBV_ACCESS_REMOTE_READ);
  SAME_VALUE(IBV_ACCESS_MW_BIND);
  SAME_VALUE(IBV_ACCESS_ZERO_BASED);
  SAME_VALUE(IBV_ACCESS_RELAXED_ORDERING);
  SAME_VALUE(IBV_MW_TYPE_1);
  SAME_VALUE(IBV_MW_TYPE_2);
}

TEST(Abi, NumbersOfConnectionsAndRequestsAreThoseOfRdmaCore) {
  SAME_VALUE(IBV_WC_SUCCESS);
  SAME_VALUE(IBV_WC_LOC_LEN_ERR);
  SAME_VALUE(IBV_WC_LOC_QP_OP_ERR);
  SAME_VALUE(IBV_WC_LOC_EEC_OP_ERR);
  SAME_VALUE(IBV_WC_LOC_PROT_ERR);
  SAME_VALUE(IBV_WC_WR_FLUSH_ERR);
  SAME_VALUE(IBV_WC_MW_BIND_ERR);
  SAME_VALUE(IBV_WC_BAD_RESP_ERR);
  SAME_VALUE(IBV_WC_LOC_ACCESS_ERR);
  SAME_VALUE(IBV_WC_REM_INV_REQ_ERR);
  SAME_VALUE(IBV_WC_REM_ACCESS_ERR);
  SAME_VALUE(IBV_WC_REM_OP_ERR);
  SAME_VALUE(IBV_WC_RETRY_EXC_ERR);
  SAME_VALUE(IBV_WC_RNR_RETRY_EXC_ERR);
  SAME_VALUE(IBV_QPT_RC);
  SAME_VALUE(IBV_QPS_RESET);
  SAME_VALUE(IBV_QPS_INIT);
  SAME_VALUE(IBV_QPS_RTR);
  SAME_VALUE(IBV_QPS_RTS);
  SAME_VALUE(IBV_QPS_SQD);
  SAME_VALUE(IBV_QPS_SQE);
  SAME_VALUE(IBV_QPS_ERR);
  SAME_VALUE(IBV_QP_STATE);
  SAME_VALUE(IBV_QP_ACCESS_FLAGS);
  SAME_VALUE(IBV_QP_PKEY_INDEX);
  SAME_VALUE(IBV_QP_PORT);
  SAME_VALUE(IBV_QP_AV);
  SAME_VALUE(IBV_QP_PATH_MTU);
  SAME_VALUE(IBV_QP_TIMEOUT);
  SAME_VALUE(IBV_QP_RETRY_CNT);
  SAME_VALUE(IBV_QP_RNR_RETRY);
  SAME_VALUE(IBV_QP_RQ_PSN);
  SAME_VALUE(IBV_QP_MAX_QP_RD_ATOMIC);
  SAME_VALUE(IBV_QP_MIN_RNR_TIMER);
  SAME_VALUE(IBV_QP_SQ_PSN);
  SAME_VALUE(IBV_QP_MAX_DEST_RD_ATOMIC);
  SAME_VALUE(IBV_QP_DEST_QPN);
  SAME_VALUE(IBV_WR_RDMA_WRITE);
  SAME_VALUE(IBV_WR_RDMA_READ);
  SAME_VALUE(IBV_WR_LOCAL_INV);
  SAME_VALUE(IBV_WR_BIND_MW);
  SAME_VALUE(IBV_SEND_FENCE);
  SAME_VALUE(IBV_SEND_SIGNALED);
  SAME_VALUE(IBV_SEND_INLINE);
}

}  // namespace

#else

TEST(Abi, IsThatOfRdmaCore) {
  GTEST_SKIP() << "the headers of rdma-core are not installed (Debian package libibverbs-dev)";
}

#endif
