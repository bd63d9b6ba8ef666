#include "client/link_opener.h"

#include <utility>

namespace mooncache {

LinkOpener::LinkOpener(Node& node, Session& session)
    : node_(node), session_(session), rdma_(session.route() == Route::kTcp) {
  if (rdma_) {
    Link* kept = session.rdma_link().get();
    if (kept != nullptr && kept->healthy()) link_ = kept;
  } else if (auto segments = node.segments(session.node().incarnation)) {
    use_memory(std::move(segments));
  }
}

void LinkOpener::use_memory(std::shared_ptr<ShmSegments> segments) {
  memory_ = std::make_unique<ShmLink>(std::move(segments), &session_);
  link_ = memory_.get();
}

bool LinkOpener::next(Request& request) {
  if (link_ != nullptr || unavailable_) return false;
  if (rdma_) return open_rdma(request);
  if (!attach_) attach_ = std::make_unique<AttachProgram>(session_);
  return attach_->next(request);
}

bool LinkOpener::open_rdma(Request& request) {
  if (!endpoint_) {
    RdmaTransport* transport = node_.rdma_for(session_, steady_ms());
    auto made = transport != nullptr
                    ? transport->make_link(session_)
                    : Result<std::unique_ptr<RdmaLink>>(Code::kTransportUnavailable, "RDMA was switched off");
    if (!made) return fail(), false;
    endpoint_ = std::make_unique<EndpointProgram>(**made);
    session_.rdma_link() = std::move(*made);
  }
  if (endpoint_->next(request)) return true;
  if (endpoint_->finished()) fail();  // no queue pair could be made here
  return false;
}

Status LinkOpener::on_response(const wire::FrameHeader& header, const Status& status, Reader& in,
                               PayloadSink& sink) {
  if (header.opcode == wire::Opcode::kAttach) {
    if (Status handled = attach_->on_response(header, status, in, sink); !handled) return handled;
    if (!attach_->segments()) return fail(), Status::ok();
    node_.set_segments(*attach_->segments(), session_.node().incarnation);
    use_memory(*attach_->segments());
  } else {
    if (Status handled = endpoint_->on_response(header, status, in, sink); !handled) return handled;
    if (!endpoint_->status()) return fail(), Status::ok();
    link_ = session_.rdma_link().get();
  }
  return Status::ok();
}

void LinkOpener::fail() {
  unavailable_ = true;
  if (!rdma_) return;
  session_.rdma_link().reset();
  node_.rdma_failed(steady_ms());
}

}  // namespace mooncache
