// Calls on device memory: which of their blocks may go in place, and what becomes of those that may not.
#include "client/impl.h"

namespace mooncache {

namespace {

// Moves nothing: its items have their codes already.
class Refusal final : public Program {
 public:
  bool next(Request&) override { return false; }
  bool finished() const override { return true; }
  Status on_response(const wire::FrameHeader&, const Status&, Reader&, PayloadSink&) override {
    return {Code::kProtocolError, "an answer to no question"};
  }
};

}  // namespace

void refuse_rest(const GetBatch& batch, Work& work, const Node& node) {
  for (; work.answered < work.items.size(); ++work.answered) {
    batch.outcomes[work.items[work.answered]] = {Code::kTransportUnavailable, 0, node.info().index};
  }
}

void refuse_rest(Work& work, std::span<Code> codes) {
  for (; work.answered < work.items.size(); ++work.answered) {
    codes[work.items[work.answered]] = Code::kTransportUnavailable;
  }
}

std::unique_ptr<Program> make_refusal() {
  return std::make_unique<Refusal>();
}

bool Client::Impl::worth_device_call(DeviceCall& call, uint64_t bytes) const {
  const auto here = [&](std::string why) {
    call.sums->set_route("staged, because " + std::move(why), true);
    return false;
  };
  if (!config.rdma.enabled) return here("the configuration switches RDMA off");
  if (const std::string why = call.sums->gpu().why_no_crc(); !why.empty())
    return here("the device computes no checksums: " + why);
  RdmaTransport* transport = rdma->opened();
  if (transport != nullptr && !transport->availability()) return here(transport->availability().message);
  return bytes >= config.rdma_min_bytes;
}

Status Client::Impl::begin_device_call(DeviceCall& call, uint64_t bytes, const CallOptions& options) const {
  if (call.sums && !worth_device_call(call, bytes)) call.sums.reset();
  if (!call.sums) return Status::ok();
  return call.sums->gpu().synchronize(options.deadline);
}

bool Client::Impl::rdma_for_device(const DeviceCall& call, Node& node, const Session& session) const {
  if (node.rdma_for(session, steady_ms()) != nullptr) return true;
  RdmaTransport* transport = rdma->opened();
  std::string why = "RDMA to node " + node.info().node_id + " failed a moment ago";
  if (session.route() != Route::kTcp)
    why = "node " + node.info().node_id + " is on this host and is reached through shared memory";
  else if (!session.offers_rdma())
    why = "node " + node.info().node_id + " does not offer RDMA";
  else if (transport != nullptr && !transport->availability())
    why = transport->availability().message;
  call.sums->set_route("staged, because " + why, true);
  return false;
}

}  // namespace mooncache
