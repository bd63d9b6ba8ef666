// One request on a session that has nothing else to do, and its answer.
#pragma once

#include <utility>
#include <vector>

#include "transport/session.h"

namespace mooncache {

// A request without payload. Keeps the meta of the answer (behind the status).
class OneRequest final : public Program {
 public:
  explicit OneRequest(Request request) : request_(std::move(request)) {}
  bool next(Request& request) override {
    if (sent_) return false;
    sent_ = true;
    request.opcode = request_.opcode;
    request.flags = request_.flags;
    request.meta.raw(request_.meta.view());
    return true;
  }
  bool sent() const { return sent_; }
  bool finished() const override { return answered_; }
  Status on_response(const wire::FrameHeader&, const Status& status, Reader& in, PayloadSink&) override {
    answered_ = true;
    status_ = status;
    const auto rest = in.take(in.remaining());
    answer_.assign(rest.begin(), rest.end());
    return Status::ok();
  }
  const Status& status() const { return status_; }
  const std::vector<std::byte>& answer() const { return answer_; }

 private:
  const Request request_;
  std::vector<std::byte> answer_;
  Status status_;
  bool sent_ = false;
  bool answered_ = false;
};

// The answer's meta; what the node answered when that is not OK.
inline Result<std::vector<std::byte>> exchange(Session& session, Request request, Deadline deadline) {
  OneRequest program(std::move(request));
  if (Status status = session.run(program, deadline); !status) return status;
  if (!program.status()) return program.status();
  return program.answer();
}

}  // namespace mooncache
