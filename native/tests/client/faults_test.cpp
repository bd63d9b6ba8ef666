// What goes wrong around a client: peers that say nothing, nodes that are full, restarted or killed, damaged
// blocks, forked children. Each test stands for a defect that was there once.
#include <arpa/inet.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include <atomic>
#include <csignal>
#include <cstdlib>
#include <thread>

#include "client/pool.h"
#include "compare.h"
#include "net/stream.h"

namespace mooncache::testing {
namespace {

std::filesystem::path new_folder(const std::string& name) {
  const auto folder =
      std::filesystem::temp_directory_path() / ("mc-" + std::to_string(getpid()) + "-" + name);
  std::filesystem::create_directories(folder);
  return folder;
}

// ---- a peer that takes connections and never says a word

class MutePeer {
 public:
  MutePeer() : fd_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    auto* generic = static_cast<sockaddr*>(static_cast<void*>(&address));
    socklen_t size = sizeof address;
    EXPECT_EQ(bind(fd_.get(), generic, size), 0);
    EXPECT_EQ(listen(fd_.get(), 16), 0);
    EXPECT_EQ(getsockname(fd_.get(), generic, &size), 0);
    info.node_id = "mute";
    info.host_id = "host-b";
    info.tcp_host = "127.0.0.1";
    info.tcp_port = ntohs(address.sin_port);
    info.weight = 1.0;
  }
  NodeInfo info;

 private:
  net::UniqueFd fd_;
};

class MuteTlsPeer : public ::testing::Test {
 protected:
  static constexpr int kDeadlineMs = 800;
  void SetUp() override {
    if (const Status tls = net::tls_availability(); !tls) GTEST_SKIP() << tls.message;
    const std::string make = "cd " + folder_.string() +
                             " && openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes "
                             "-keyout ca.key -out ca.pem -days 2 -subj /CN=test-ca >/dev/null 2>&1";
    if (std::system(make.c_str()) != 0) GTEST_SKIP() << "the openssl command line tool is not usable here";
    ClientConfig config = client_config(false);
    config.tls.enabled = true;
    config.tls.ca_file = folder_ / "ca.pem";
    config.connect_timeout_ms = 1000;
    client_ = client_for({peer_.info}, config);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::filesystem::path folder_ = new_folder("mute");
  MutePeer peer_;
  std::unique_ptr<Client> client_;
};

TEST_F(MuteTlsPeer, ReserveKeepsItsDeadline) {
  const Deadline late = Deadline::after_ms(10 * kDeadlineMs);
  EXPECT_FALSE(client_->reserve(key_of(1), 100, within_ms(kDeadlineMs)));
  EXPECT_FALSE(late.expired());
}

TEST_F(MuteTlsPeer, PutSleepsUntilItsDeadline) {
  EXPECT_FALSE(client_->reserve(key_of(1), 100, within_ms(50)));  // loads what TLS needs
  const auto cpu_ms = [] {
    rusage used{};
    getrusage(RUSAGE_THREAD, &used);
    return (used.ru_utime.tv_sec + used.ru_stime.tv_sec) * 1000 +
           (used.ru_utime.tv_usec + used.ru_stime.tv_usec) / 1000;
  };
  const auto before_ms = cpu_ms();
  const Deadline late = Deadline::after_ms(10 * kDeadlineMs);
  EXPECT_NE(put_one(*client_, key_of(1), bytes_of(1, 100), 1, within_ms(kDeadlineMs)).code, Code::kOk);
  EXPECT_FALSE(late.expired());
  EXPECT_LT(cpu_ms() - before_ms, kDeadlineMs / 2) << "the thread was busy instead of asleep";
}

// ---- over TCP and over shared memory

class Faults : public ::testing::TestWithParam<bool> {};

TEST_P(Faults, BatchLargerThanTheNodeIsStoredByEvicting) {
  constexpr size_t kBlocks = 32;
  TestNode node(0, 16 << 20);
  auto client = client_for({node.info}, client_config(GetParam()));
  std::vector<std::vector<std::byte>> sources;
  for (size_t i = 0; i < kBlocks; ++i) sources.push_back(bytes_of(i, 1 << 20));
  std::vector<ConstSlice> slices;
  for (const auto& source : sources) slices.emplace_back(source.data(), source.size());
  std::vector<PutBlock> blocks;
  for (size_t i = 0; i < kBlocks; ++i) blocks.push_back({key_of(i), std::span(&slices[i], 1)});
  std::vector<PutOutcome> outcomes(kBlocks);
  ASSERT_TRUE(client->put(blocks, 1, {}, outcomes));
  for (size_t i = 0; i < kBlocks; ++i) EXPECT_EQ(outcomes[i].code, Code::kOk) << i;
}

TEST_P(Faults, NodeRestartedBeforeTheMapKnows) {
  constexpr size_t kSize = 1 << 20;
  TestNode node(0);
  auto client = client_for({node.info}, client_config(GetParam()));
  ASSERT_EQ(put_one(*client, key_of(1), bytes_of(1, kSize)).code, Code::kOk);
  node.config.tcp_port = node.info.tcp_port;
  node.stop();
  node.config.incarnation += 1;
  node.start();
  auto other = client_for({node.info}, client_config(GetParam()));  // has the new map
  for (uint64_t i = 10; i < 15; ++i) {
    const auto source = bytes_of(i, kSize);
    ASSERT_EQ(put_one(*other, key_of(i), source).code, Code::kOk) << i;
    std::vector<std::byte> copy(kSize);
    EXPECT_EQ(get_one(*client, key_of(i), copy).code, Code::kOk) << i;
    EXPECT_TRUE(same_bytes(copy, source)) << i;
    EXPECT_EQ(put_one(*client, key_of(i + 10), source).code, Code::kOk) << i;
  }
}

// The lane of `first` is the one on which another thread waits for space.
TEST_P(Faults, WaitingForSpaceDoesNotHoldUpOtherReservations) {
  constexpr size_t kSize = 3 << 20;
  TestNode node(0, 8 << 20);
  ClientConfig config = client_config(GetParam());
  config.put_wait_ms = 20'000;
  auto client = client_for({node.info}, config);
  auto other = client_for({node.info}, client_config(false));
  auto hold = other->reserve(key_of(7), 4 << 20, {});
  ASSERT_TRUE(hold) << hold.status().message;
  auto first = client->reserve(key_of(1), kSize, {});
  ASSERT_TRUE(first) << first.status().message;
  std::atomic<Code> waited{Code::kInternal};
  std::thread waiter([&] { waited = client->reserve(key_of(2), kSize, within_ms(60'000)).code(); });
  sleep_ms(100);
  const auto source = bytes_of(1, kSize);
  const ConstSlice slice(source.data(), source.size());
  const Status written = (*first)->write(0, std::span(&slice, 1), within_ms(5000));
  EXPECT_TRUE(written) << written.message;
  const Status committed = (*first)->commit(within_ms(5000));
  EXPECT_TRUE(committed) << committed.message;
  waiter.join();  // what was committed may be evicted
  EXPECT_EQ(waited.load(), Code::kOk);
}

// A writer that computes for longer than the node trusts a silent peer.
TEST(Reservations, SlowWriterKeepsItsReservation) {
  TestNode node(0, 8 << 20, "host-b", false);
  node.stop();
  node.config.grant_timeout_ms = 1000;
  node.start();
  ClientConfig config = client_config(false);
  config.ping_interval_ms = 50;
  auto client = client_for({node.info}, config);
  const auto source = bytes_of(1, 1 << 20);
  auto reservation = client->reserve(key_of(1), source.size(), {});
  ASSERT_TRUE(reservation) << reservation.status().message;
  const auto stat = [&](std::string_view name) {
    for (const auto& [key, value] : node.server->stats()) {
      if (key == name) return value;
    }
    return uint64_t{0};
  };
  const Deadline until = Deadline::after_ms(20'000);
  const Deadline quiet = Deadline::after_ms(2500);  // no call of the writer meanwhile
  while (!quiet.expired() || (stat("requests_ping") < 10 && !until.expired())) sleep_ms(20);
  EXPECT_EQ(stat("connections_closed_idle"), 0u);
  const ConstSlice slice(source.data(), source.size());
  const Status written = (*reservation)->write(0, std::span(&slice, 1), within_ms(5000));
  EXPECT_TRUE(written) << written.message;
  const Status committed = (*reservation)->commit(within_ms(5000));
  EXPECT_TRUE(committed) << committed.message;
}

TEST_P(Faults, ReserveOnAFullNodeEndsWithItsWait) {
  TestNode node(0, 8 << 20);
  ClientConfig config = client_config(GetParam());
  config.put_wait_ms = 150;
  auto client = client_for({node.info}, config);
  auto other = client_for({node.info}, config);
  auto hold = other->reserve(key_of(1), 4 << 20, {});
  ASSERT_TRUE(hold) << hold.status().message;
  // a lane for itself, then one that another reservation uses
  EXPECT_EQ(client->reserve(key_of(2), 5 << 20, {}).code(), Code::kNoSpace);
  auto beside = client->reserve(key_of(3), 3 << 20, {});
  ASSERT_TRUE(beside) << beside.status().message;
  EXPECT_EQ(client->reserve(key_of(2), 3 << 20, {}).code(), Code::kNoSpace);
  CancelToken token;
  token.cancel();
  CallOptions cancelled;
  cancelled.cancel = &token;
  EXPECT_EQ(client->reserve(key_of(2), 3 << 20, cancelled).code(), Code::kCancelled);
  hold->reset();
  EXPECT_TRUE(client->reserve(key_of(2), 3 << 20, {}));
}

TEST_P(Faults, DamagedBlockCanBeStoredAgain) {
  TestNode node(0);
  auto client = client_for({node.info}, client_config(GetParam()));
  const auto source = bytes_of(1, 1 << 20);
  std::vector<std::byte> copy(source.size());
  ASSERT_EQ(put_one(*client, key_of(1), source).code, Code::kOk);
  node.server->store().flip_bit(node.tenant(), key_of(1), 12345);
  EXPECT_EQ(get_one(*client, key_of(1), copy).code, Code::kChecksumMismatch);
  EXPECT_EQ(put_one(*client, key_of(1), source).code, Code::kOk);
  EXPECT_EQ(get_one(*client, key_of(1), copy).code, Code::kOk);
  EXPECT_TRUE(same_bytes(copy, source));
}

TEST_P(Faults, ForkedChildKeepsNoReservationAlive) {
  TestNode node(0);
  auto client = client_for({node.info}, client_config(GetParam()));
  auto reservation = client->reserve(key_of(1), 1 << 20, {});
  ASSERT_TRUE(reservation) << reservation.status().message;
  ASSERT_EQ(server_stat(node, "reservations_held"), 1u);
  const pid_t child = fork();  // with a copy of the client's socket
  ASSERT_GE(child, 0);
  if (child == 0) {
    for (;;) pause();
  }
  client->close();  // from here on only the end of the connection can give the space back
  reservation->reset();
  client.reset();
  EXPECT_TRUE(eventually([&] { return server_stat(node, "reservations_held") == 0; }));
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
}

INSTANTIATE_TEST_SUITE_P(Routes, Faults, ::testing::Bool(),
                         [](const auto& param) { return param.param ? "Shm" : "Tcp"; });

// ---- a node in a process of its own, which can be killed

class NodeProcess {
 public:
  // Forks at once, so that it can be made before this process has threads; it serves from start() on.
  NodeProcess(const std::string& unix_path, uint64_t incarnation) {
    int begin[2], ends[2];
    EXPECT_EQ(pipe(begin), 0);
    EXPECT_EQ(pipe(ends), 0);
    child_ = fork();
    if (child_ == 0) {
      uint16_t port = 0;
      if (read(begin[0], &port, sizeof port) != static_cast<ssize_t>(sizeof port)) _exit(2);
      serve(unix_path, port, incarnation, ends[1]);
    }
    close(begin[0]);
    close(ends[1]);
    begin_ = begin[1];
    answer_ = ends[0];
    info.incarnation = incarnation;
    info.unix_path = unix_path;
  }
  void start(uint16_t tcp_port = 0) {
    uint16_t port = 0;
    EXPECT_EQ(write(begin_, &tcp_port, sizeof tcp_port), static_cast<ssize_t>(sizeof tcp_port));
    EXPECT_EQ(read(answer_, &port, sizeof port), static_cast<ssize_t>(sizeof port))
        << "the node did not start";
    info.node_id = "node-0";
    info.host_id = "host-a";
    info.tcp_host = "127.0.0.1";
    info.tcp_port = port;
    info.weight = 1.0;
  }
  ~NodeProcess() {
    die();
    close(begin_);
    close(answer_);
  }
  void die() {
    if (child_ <= 0) return;
    kill(child_, SIGKILL);
    waitpid(child_, nullptr, 0);
    child_ = 0;
  }
  NodeInfo info;

 private:
  [[noreturn]] static void serve(const std::string& unix_path, uint16_t tcp_port, uint64_t incarnation,
                                 int answer) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    ServerConfig config;
    config.node_id = "node-0";
    config.host_id = "host-a";
    config.secret = secret();
    config.incarnation = incarnation;
    config.unix_path = unix_path;
    config.tcp_port = tcp_port;
    config.store.shards = 1;  // slots are given out in the same order by each process
    auto server = StoreServer::create(config);
    if (!server || !(*server)->start()) _exit(3);
    const uint16_t port = (*server)->endpoints().tcp_port;
    if (write(answer, &port, sizeof port) != static_cast<ssize_t>(sizeof port)) _exit(4);
    for (;;) pause();
  }
  pid_t child_ = 0;
  int begin_ = -1, answer_ = -1;
};

// A slot's generation in the dead process's memory may equal the one in its successor's.
// "DeathTest" has it run before all others: its node is a fork, and under TSan only a process that has no
// threads (those of the fake network stay) may fork one that starts some.
TEST(NodeDeathTest, NoPutIsAcknowledgedIntoDeadMemory) {
  constexpr size_t kSize = 1 << 20;
  const auto folder = new_folder("death");
  const std::string path = folder / "n.sock";
  NodeProcess before(path, 1), after(path, 2);
  before.start();
  auto client = client_for({before.info}, client_config(true));
  ASSERT_EQ(put_one(*client, key_of(1), bytes_of(1, kSize)).code, Code::kOk);
  auto held = client->reserve(key_of(2), kSize, {});
  ASSERT_TRUE(held) << held.status().message;
  before.die();
  after.start(before.info.tcp_port);
  auto other = client_for({after.info}, client_config(true));
  ASSERT_EQ(put_one(*other, key_of(50), bytes_of(50, kSize)).code, Code::kOk);
  const auto source = bytes_of(3, kSize);
  EXPECT_EQ(put_one(*client, key_of(3), source).code, Code::kOk);
  std::vector<std::byte> copy(kSize);
  EXPECT_EQ(get_one(*other, key_of(3), copy).code, Code::kOk);
  EXPECT_TRUE(same_bytes(copy, source));
  std::filesystem::remove_all(folder);
}

// ---- limits

// A full node says as little as a stopped one: what tells them apart is that it answers somebody else.
TEST(Limits, AFullNodeThatLivesMayHoldAPutBack) {
  TestNode full(0, 8 << 20), roomy(1, 64 << 20);
  ClientConfig config = client_config(false);
  config.stall_timeout_ms = 1500;
  config.put_wait_ms = 20'000;
  auto client = client_for({full.info, roomy.info}, config);
  CallOptions there = within_ms(5000);
  there.node = 0;
  auto held = client->reserve(key_of(1), 7 << 20, there);
  ASSERT_TRUE(held) << held.status().message;
  const auto bytes = bytes_of(2, 4 << 20);
  std::thread releaser([&] {
    EXPECT_TRUE(eventually([&] { return server_stat(full, "parked_total") > 0; }));
    sleep_ms(4500);  // three times as long as a silence may last
    EXPECT_TRUE((*held)->abort(CallOptions{}));
  });
  const PutOutcome outcome = put_one(*client, key_of(2), bytes, 2, within_ms(30'000));
  releaser.join();
  EXPECT_EQ(outcome.code, Code::kOk);
  EXPECT_EQ(outcome.copies, 2u) << "the full node had room in time";
  EXPECT_EQ(stat_of(*client, "stalls"), 0u);
}

// A client with one lane, which a put of another thread has: it waits for space that nobody gives back.
class BusyLane : public ::testing::Test {
 protected:
  void occupy(uint32_t put_wait_ms) {
    ClientConfig config = client_config(false);
    config.lanes_per_node = 1;
    config.put_wait_ms = put_wait_ms;
    config.stall_timeout_ms = 1000;
    client_ = client_for({node_.info, spare_.info}, config);
    CallOptions there;
    there.node = 0;
    for (const auto& [key, source] : {std::pair{small_, small_bytes_}, std::pair{large_, large_bytes_}})
      ASSERT_EQ(put_one(*client_, key, source, 1, there).code, Code::kOk);
    const Key kept[] = {small_, large_};
    std::vector<Code> codes(2);
    ASSERT_TRUE(other_->pin(kept, 60'000, {}, codes));
    auto hold = other_->reserve(key_of(9), 6 << 20, {});
    ASSERT_TRUE(hold) << hold.status().message;
    hold_ = std::move(*hold);
    slow_ = std::thread([this, there] {
      CallOptions options = there;
      options.cancel = &cancel_;
      put_one(*client_, key_of(3), bytes_of(3, 4 << 20), 1, options);
      slow_ended_ = true;
    });
    EXPECT_TRUE(eventually([&] { return server_stat(node_, "parked_total") > 0; }));
  }
  void TearDown() override {
    cancel_.cancel();
    slow_.join();
  }

  TestNode node_{0, 8 << 20, "host-a"};
  TestNode spare_{1, 8 << 20, "host-b"};
  std::unique_ptr<Client> client_;
  std::unique_ptr<Client> other_ = client_for({node_.info}, client_config(false));
  std::unique_ptr<BlockReservation> hold_;
  const Key small_ = key_of(1), large_ = key_of(2);
  const std::vector<std::byte> small_bytes_ = bytes_of(1, 1000), large_bytes_ = bytes_of(2, 256 << 10);
  CancelToken cancel_;
  std::thread slow_;
  std::atomic<bool> slow_ended_{false};
};

TEST_F(BusyLane, WaitingForItIsNotHeldAgainstTheNode) {
  occupy(3000);
  std::vector<std::byte> copy(large_bytes_.size());
  EXPECT_EQ(get_one(*client_, large_, copy).code, Code::kOk);
  EXPECT_TRUE(copy == large_bytes_);
}

TEST_F(BusyLane, SmallCallsDoNotWaitForIt) {
  occupy(60'000);
  std::vector<std::byte> copy(small_bytes_.size());
  EXPECT_EQ(get_one(*client_, small_, copy, within_ms(10'000)).code, Code::kOk);
  EXPECT_TRUE(copy == small_bytes_);
  const auto found = client_->match(std::span(&large_, 1), false, within_ms(10'000));
  ASSERT_TRUE(found) << found.status().message;
  EXPECT_EQ(found->present, 1u);
  EXPECT_EQ(found->unreachable_nodes, 0u);
  EXPECT_FALSE(slow_ended_);
}

// The node answers LIMIT_EXCEEDED for what does not fit beside the others of its frame.
TEST(Limits, ItemsThatDoNotFitTheirFrameAreAskedForAgain) {
  constexpr size_t kBlocks = 16;  // go out in one frame
  constexpr size_t kSize = 64 << 10;
  TestNode node(0);
  node.stop();
  node.config.max_pins_per_connection = 1;
  node.start();
  auto client = client_for({node.info}, client_config(false));
  std::vector<std::vector<std::byte>> copies(kBlocks);
  std::vector<GetBlock> blocks;
  for (size_t i = 0; i < kBlocks; ++i) {
    ASSERT_EQ(put_one(*client, key_of(i), bytes_of(i, kSize)).code, Code::kOk) << i;
    blocks.push_back({key_of(i), {}, 0});
  }
  GetOptions how;
  how.allocate = [&](size_t item, uint64_t size) {
    copies[item].resize(size);
    return copies[item].data();
  };
  std::vector<GetOutcome> outcomes(kBlocks);
  ASSERT_TRUE(client->get(blocks, how, {}, outcomes));
  size_t served = 0;
  for (size_t i = 0; i < kBlocks; ++i) {
    if (outcomes[i].code != Code::kOk) {
      EXPECT_EQ(outcomes[i].code, Code::kLimitExceeded) << i;
      continue;
    }
    ++served;
    EXPECT_TRUE(copies[i] == bytes_of(i, kSize)) << i;
  }
  EXPECT_GT(served, 1u) << "only the first of the frame was served";
}

}  // namespace
}  // namespace mooncache::testing
