// One request on a session that has nothing else to do, and its answer.
#pragma once

#include <vector>

#include "transport/session.h"

namespace mooncache {

// Keeps the meta of the answer (behind the status).
class OneAnswer final : public Program {
 public:
  OneAnswer(wire::Opcode opcode, Writer meta, uint16_t flags)
      : opcode_(opcode), flags_(flags), meta_(meta.take()) {}
  bool next(Request& request) override {
    if (sent_) return false;
    sent_ = true;
    request.opcode = opcode_;
    request.flags = flags_;
    request.meta.raw(meta_);
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
  std::vector<std::byte> take_answer() { return std::move(answer_); }

 private:
  const wire::Opcode opcode_;
  const uint16_t flags_;
  const std::vector<std::byte> meta_;
  std::vector<std::byte> answer_;
  Status status_;
  bool sent_ = false;
  bool answered_ = false;
};

// The answer's meta; what the node answered when that is no OK.
inline Result<std::vector<std::byte>> ask(Session& session, wire::Opcode opcode, Writer meta, uint16_t flags,
                                          Deadline deadline) {
  OneAnswer program(opcode, std::move(meta), flags);
  if (Status status = session.run(program, deadline); !status) return status;
  if (!program.status()) return program.status();
  return program.take_answer();
}

}  // namespace mooncache
