// BlockWatch against a node that lies, or says nothing.
#include <poll.h>
#include <sys/socket.h>

#include <atomic>
#include <functional>
#include <random>
#include <thread>

#include "client/watches.h"
#include "net/socket.h"

namespace mooncache::testing {
namespace {

using wire::Opcode;

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
                                     Opcode opcode = Opcode::kWait) {
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

  NodeInfo info;
  std::atomic<int> frames{0};  // after the handshake

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
      const net::UniqueFd fd = net::accept_connection(listener_.get(), {}, &error);
      while (fd.valid() && one_frame(fd.get())) {
      }
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
    if (header->opcode == Opcode::kHello) {
      nonce_ = wire::HelloRequest::decode(meta)->client_nonce;
      wire::HelloResponse{}.encode(answer);
      return send(fd, frame(*header, answer.view()));
    }
    if (header->opcode == Opcode::kAuth) {
      wire::AuthResponse auth;
      auth.server_mac = wire::auth_mac(false, wire::tenant_key(secret(), "default"), {}, nonce_, "default");
      auth.capabilities = capabilities_;
      auth.node_id = "liar";
      auth.encode(answer);
      return send(fd, frame(*header, answer.view()));
    }
    ++frames;
    const auto bytes = answer_(*header);
    return bytes.empty() || send(fd, bytes);
  }

  Answer answer_;
  uint32_t capabilities_;
  wire::Bytes16 nonce_{};
  net::UniqueFd listener_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

WatchNews first_end(LyingNode& node) {
  const auto client = client_for({node.info}, client_config(false));
  const auto watch = client->watch();
  EXPECT_TRUE(watch->add("a", keys_from(0, 3), Deadline::after_ms(60'000), 0, 0));
  return ends_of(*watch, 1).at("a");
}

TEST(LyingNodes, EndTheirOwnWatches) {
  const std::vector<LyingNode::Answer> lies{
      [](const auto& asked) { return LyingNode::news(asked.request_id, 1, {3}); },  // no such key
      [](const auto& asked) { return LyingNode::news(asked.request_id, 9, {}); },   // no such state
      [](const auto& asked) {
        return LyingNode::news(asked.request_id, 1, {0, 1, 2, 0});
      },  // too many
      [](const auto& asked) {
        return LyingNode::news(asked.request_id, 1, {}, Opcode::kGet);
      },  // other opcode
      [](const auto& asked) {
        auto bytes = LyingNode::news(asked.request_id, 1, {0, 1, 2});
        bytes.back() ^= std::byte{1};
        return bytes;
      },
      [](const auto& asked) {  // a payload
        wire::FrameHeader header;
        header.opcode = Opcode::kWait;
        header.request_id = asked.request_id;
        header.payload_bytes = 1;
        Writer meta;
        wire::encode_status(meta, Status::ok());
        return LyingNode::frame(header, meta.view());
      },
      [](const auto&) { return std::vector<std::byte>(100, std::byte{0x55}); },
  };
  for (size_t i = 0; i < lies.size(); ++i) {
    LyingNode node(lies[i]);
    const WatchNews end = first_end(node);
    EXPECT_EQ(end.state, WatchState::kUnreachable) << "lie " << i;
    EXPECT_EQ(end.code, Code::kProtocolError) << "lie " << i;
    EXPECT_TRUE(end.positions.empty()) << "lie " << i;
  }
}

TEST(LyingNodes, AnyAnswerIsTakenOrRefused) {
  for (uint64_t seed = 0; seed < 100; ++seed) {
    LyingNode node([seed](const auto& asked) {
      std::mt19937_64 random(seed);
      Writer meta;
      wire::encode_status(meta, {random() % 4 == 0 ? static_cast<Code>(random()) : Code::kOk, "words"});
      if (random() % 2 == 0) {  // a state and a count that may be right, then anything
        meta.u32(static_cast<uint32_t>(random() % 6));
        meta.u32(static_cast<uint32_t>(random() % 5));
      }
      for (uint64_t left = random() % 20; left > 0; --left) meta.u8(static_cast<uint8_t>(random() % 5));
      wire::FrameHeader header;
      header.opcode = Opcode::kWait;
      header.request_id = asked.request_id;
      auto bytes = LyingNode::frame(header, meta.view());
      if (random() % 3 == 0) bytes[random() % bytes.size()] ^= std::byte{1} << (random() % 8);
      return bytes;
    });
    const auto client = client_for({node.info}, client_config(false));
    const auto watch = client->watch();
    ASSERT_TRUE(watch->add("a", keys_from(0, 3), Deadline::after_ms(50), 0, 1));
    const WatchNews end = ends_of(*watch, 1).at("a");
    EXPECT_EQ(end.state == WatchState::kAll, end.positions.size() == 3) << "seed " << seed;
    for (const uint32_t position : end.positions) EXPECT_LT(position, 3u) << "seed " << seed;
  }
}

TEST(LyingNodes, AnswersToOtherRequestsAreNoAnswer) {
  LyingNode node([](const auto& asked) {
    auto bytes = LyingNode::news(asked.request_id + 1000, 1, {0, 1, 2});
    const auto right = LyingNode::news(asked.request_id, 2, {1});
    bytes.insert(bytes.end(), right.begin(), right.end());
    return bytes;
  });
  const WatchNews end = first_end(node);
  EXPECT_EQ(end.state, WatchState::kGivenUp);
  EXPECT_EQ(end.positions, Positions{1});
}

TEST(LyingNodes, ANodeThatSaysAllWithoutThePositionsIsNotBelieved) {
  LyingNode node([](const auto& asked) { return LyingNode::news(asked.request_id, 1, {0}); });
  const WatchNews end = first_end(node);
  EXPECT_EQ(end.state, WatchState::kUnreachable);
  EXPECT_EQ(end.positions, Positions{0});
}

TEST(LyingNodes, AnOlderNodeIsNotAskedToWait) {
  LyingNode node([](const auto&) { return std::vector<std::byte>{}; }, 0);
  const WatchNews end = first_end(node);
  EXPECT_EQ(end.state, WatchState::kUnreachable);
  EXPECT_EQ(end.code, Code::kUnsupported);
  EXPECT_EQ(node.frames, 0);
  const auto client = client_for({node.info}, client_config(false));
  const auto ended = client->give_up(keys_from(0, 2), within_ms(20'000));
  ASSERT_TRUE(ended) << ended.status().message;
  EXPECT_EQ(*ended, 0u);
  EXPECT_EQ(node.frames, 0);
}

TEST(LyingNodes, ANodeThatFallsSilentIsFoundOut) {
  LyingNode node([](const auto&) { return std::vector<std::byte>{}; });
  ClientConfig config = client_config(false);
  config.ping_interval_ms = 50;
  config.connect_timeout_ms = 200;
  const auto client = client_for({node.info}, config);
  const auto watch = client->watch();
  ASSERT_TRUE(watch->add("a", keys_from(0, 3), Deadline::after_ms(60'000), 0, 0));
  const WatchNews end = ends_of(*watch, 1).at("a");
  EXPECT_EQ(end.state, WatchState::kUnreachable);
  EXPECT_EQ(end.code, Code::kNodeUnavailable);
  EXPECT_EQ(node.frames, 2) << "the WAIT and one PING";
}

TEST(LyingNodes, APatientWatchIsLateByALittleOnly) {
  LyingNode node([](const auto&) { return std::vector<std::byte>{}; });
  const auto client = client_for({node.info}, client_config(false));
  const auto watch = client->watch();
  ASSERT_TRUE(watch->add("a", keys_from(0, 3), Deadline::after_ms(100), 0, 0));
  EXPECT_EQ(ends_of(*watch, 1).at("a").state, WatchState::kTimeout) << "although the node says nothing";
}

TEST(LyingNodes, NoNodeNoWatch) {
  const auto client = client_for({}, client_config(false));
  const auto watch = client->watch();
  EXPECT_EQ(watch->add("a", keys_from(0, 3), Deadline::after_ms(100), std::nullopt, 0).code, Code::kNoNodes);
  EXPECT_EQ(client->give_up(keys_from(0, 1), within_ms(100)).code(), Code::kNoNodes);
}

}  // namespace
}  // namespace mooncache::testing
