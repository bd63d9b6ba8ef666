// One peer of an engine: a queue of jobs, the thread that does them, and its connection.
#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "mooncache/transfer_engine.h"
#include "net/socket.h"
#include "transfer/mapped_regions.h"
#include "transport/session.h"
#include "wire/ranges.h"

namespace mooncache::transfer {

class Job final : public EngineTransfer {
 public:
  enum class Kind : uint8_t { kRead, kWrite, kNotify, kDescribe };
  Job(Kind kind_in, Deadline deadline_in);

  Status wait(Deadline deadline) override;
  bool done() const override;
  void cancel() override;
  std::string route() const override;

  // The peer's thread. False: it is over already.
  bool claim();
  bool cancelled() const { return cancelled_.load(); }
  int cancel_fd() const { return cancel_fd_.get(); }
  void finish(Status status);
  void set_route(std::string route);

  const Kind kind;
  const Deadline deadline;
  std::vector<RangeCopy> copies;
  std::vector<std::byte> notice;
  std::vector<std::byte> answer;  // kDescribe, when it is done

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  enum class State : uint8_t { kQueued, kRunning, kDone };
  State state_ = State::kQueued;
  Status status_;
  std::string route_;
  std::atomic<bool> cancelled_{false};
  net::UniqueFd cancel_fd_;
};

struct PeerOptions {
  Credentials credentials;
  PeerTls tls;
  bool shared_memory = false;  // may be tried
};

class Peer final : public EnginePeer {
 public:
  static constexpr size_t kMaxQueued = 1024;

  Peer(wire::EngineDescriptor descriptor, PeerOptions options);
  ~Peer() override;

  // Connects, and asks for the descriptor.
  Status open(Deadline deadline);

  std::string name() const override;
  std::vector<DescribedMemory> regions() const override;
  Status refresh(Deadline deadline) override;
  Result<std::shared_ptr<EngineTransfer>> submit(Direction direction, std::vector<RangeCopy> copies,
                                                 Deadline deadline) override;
  Status notify(std::span<const std::byte> bytes, Deadline deadline) override;
  void close() override;

 private:
  Status enqueue(std::shared_ptr<Job> job);
  void run();
  Status carry_out(Job& job);
  Status attempt(Job& job);
  Status ensure_session(Job& job);
  Status exchange(Job& job, wire::Opcode opcode, std::span<const std::byte> meta,
                  std::vector<std::byte>& answer);
  // Copies by this side, when all of the ranges can be mapped. False: they cannot.
  bool may_map(Job& job, Status& failed);
  Status copy_mapped(Job& job);
  Status copy_part(Job& job, std::span<const RangeCopy> part);
  bool is_mappable(uint64_t address) const;
  Status learn(std::span<const std::byte> descriptor);

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Job>> queue_;
  std::shared_ptr<Job> current_;
  bool closed_ = false;
  wire::EngineDescriptor descriptor_;  // under mutex_

  const PeerOptions options_;
  // The thread's own.
  std::unique_ptr<Session> session_;
  MappedRegions mapped_;
  bool no_mapping_ = false;  // the peer refused once
  bool no_unix_ = false;
  std::thread thread_;
};

}  // namespace mooncache::transfer
