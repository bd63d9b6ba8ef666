// A node that answers what a test wants.
#pragma once

#include <poll.h>
#include <sys/socket.h>

#include <atomic>
#include <functional>
#include <mutex>
#include <thread>

#include "client/pool.h"
#include "net/socket.h"

namespace mooncache::testing {

// Takes one connection at a time, proves itself, then answers the first frame with what a test wants.
class LyingNode {
 public:
  using Answer = std::function<std::vector<std::byte>(const wire::FrameHeader&)>;
  explicit LyingNode(Answer answer, uint32_t capabilities = wire::AuthResponse::kCanWait)
      : answer_(std::move(answer)), capabilities_(capabilities) {
    auto fd = net::listen_tcp("127.0.0.1", 0);
    EXPECT_TRUE(fd);
    listener_ = std::move(*fd);
    info.node_id = "liar";
    info.host_id = "host-b";
    info.tcp_host = "127.0.0.1";
    info.tcp_port = *net::local_port(listener_.get());
    info.weight = 1.0;
    thread_ = std::thread([this] { serve(); });
  }
  ~LyingNode() {
    stop_ = true;
    thread_.join();
  }
  static std::vector<std::byte> frame(wire::FrameHeader header, std::span<const std::byte> meta) {
    header.response = true;
    const auto head = wire::encode_header(header, meta);
    std::vector<std::byte> bytes(head.begin(), head.end());
    bytes.insert(bytes.end(), meta.begin(), meta.end());
    return bytes;
  }
  static std::vector<std::byte> news(uint64_t id, uint32_t state, std::vector<uint32_t> positions,
                                     wire::Opcode opcode = wire::Opcode::kWait) {
    Writer meta;
    wire::encode_status(meta, Status::ok());
    meta.u32(state);
    meta.u32(static_cast<uint32_t>(positions.size()));
    for (const uint32_t position : positions) meta.u32(position);
    wire::FrameHeader header;
    header.opcode = opcode;
    header.request_id = id;
    return frame(header, meta.view());
  }

  // Unasked, on the connection that is open.
  void say(std::span<const std::byte> bytes) {
    const std::lock_guard lock(mutex_);
    EXPECT_TRUE(connection_.valid() && send(connection_.get(), bytes));
  }

  NodeInfo info;
  std::atomic<int> frames{0};       // after the handshake
  std::atomic<int> beats_asked{0};  // WAITs with kFlagHeartbeats

 private:
  bool receive(int fd, std::span<std::byte> bytes) {
    while (!bytes.empty()) {
      const ssize_t count = ::recv(fd, bytes.data(), bytes.size(), MSG_DONTWAIT);
      if (count > 0) {
        bytes = bytes.subspan(static_cast<size_t>(count));
        continue;
      }
      if (count == 0 || (errno != EAGAIN && errno != EWOULDBLOCK) || stop_) return false;
      (void)net::wait_ready(fd, POLLIN, -1, Deadline::after_ms(10));
    }
    return true;
  }
  bool send(int fd, std::span<const std::byte> bytes) {
    return ::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(bytes.size());
  }
  void serve() {
    while (!stop_) {
      if (!net::wait_ready(listener_.get(), POLLIN, -1, Deadline::after_ms(10))) continue;
      int error = 0;
      net::UniqueFd accepted = net::accept_connection(listener_.get(), {}, &error);
      const int fd = accepted.get();
      {
        const std::lock_guard lock(mutex_);
        connection_ = std::move(accepted);
      }
      while (fd >= 0 && one_frame(fd)) {
      }
      const std::lock_guard lock(mutex_);
      connection_.reset();
    }
  }
  bool one_frame(int fd) {
    wire::HeaderBytes head;
    if (!receive(fd, head)) return false;
    const auto header = wire::decode_header(head);
    if (!header) return false;
    std::vector<std::byte> meta(header->meta_bytes);
    if (!receive(fd, meta)) return false;
    Writer answer;
    wire::encode_status(answer, Status::ok());
    if (header->opcode == wire::Opcode::kHello) {
      nonce_ = wire::HelloRequest::decode(meta)->client_nonce;
      wire::HelloResponse{}.encode(answer);
      return send(fd, frame(*header, answer.view()));
    }
    if (header->opcode == wire::Opcode::kAuth) {
      wire::AuthResponse auth;
      auth.server_mac = wire::auth_mac(false, wire::tenant_key(secret(), "default"), {}, nonce_, "default");
      auth.capabilities = capabilities_;
      auth.node_id = "liar";
      auth.encode(answer);
      return send(fd, frame(*header, answer.view()));
    }
    if (header->opcode == wire::Opcode::kWait && (header->flags & wire::kFlagHeartbeats) != 0) ++beats_asked;
    ++frames;
    const auto bytes = answer_(*header);
    return bytes.empty() || send(fd, bytes);
  }

  Answer answer_;
  uint32_t capabilities_;
  wire::Bytes16 nonce_{};
  net::UniqueFd listener_;
  std::mutex mutex_;
  net::UniqueFd connection_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace mooncache::testing
