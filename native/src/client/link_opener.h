// The one-sided link of a session: shared memory on a unix socket, RDMA on TCP. Where there is none yet it is
// made first (ATTACH, ENDPOINT).
#pragma once

#include <memory>

#include "client/node.h"

namespace mooncache {

class LinkOpener {
 public:
  LinkOpener(Node& node, Session& session);

  bool rdma() const { return rdma_; }
  // Null: it is not there yet, or it never will be.
  Link* link() const { return link_; }
  // This connection cannot move bytes by itself.
  bool unavailable() const { return unavailable_; }

  // The next request that opens the link; false: there is none to send at this moment.
  bool next(Request& request);
  static bool answers(wire::Opcode opcode) {
    return opcode == wire::Opcode::kAttach || opcode == wire::Opcode::kEndpoint;
  }
  Status on_response(const wire::FrameHeader& header, const Status& status, Reader& in, PayloadSink& sink);

 private:
  bool open_rdma(Request& request);
  void use_memory(std::shared_ptr<ShmSegments> segments);
  void fail();

  Node& node_;
  Session& session_;
  const bool rdma_;
  Link* link_ = nullptr;
  bool unavailable_ = false;
  std::unique_ptr<ShmLink> memory_;
  std::unique_ptr<AttachProgram> attach_;
  std::unique_ptr<EndpointProgram> endpoint_;
};

}  // namespace mooncache
