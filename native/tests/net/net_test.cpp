#include <gtest/gtest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <random>
#include <thread>

#include "net/socket.h"
#include "net/stream.h"

namespace mooncache::net {
namespace {

class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "mooncache-net-XXXXXX").string();
    path_ = mkdtemp(pattern.data());
  }
  ~TemporaryFolder() { std::filesystem::remove_all(path_); }
  std::string file(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

struct Pair {
  std::unique_ptr<Stream> client;
  std::unique_ptr<Stream> server;
};

UniqueFd accept_within(int listener, int timeout_ms = 2000) {
  int error = 0;
  if (!wait_ready(listener, POLLIN, -1, Deadline::after_ms(timeout_ms))) return UniqueFd();
  return accept_connection(listener, {}, &error);
}

std::pair<UniqueFd, UniqueFd> tcp_pair() {
  auto listener = listen_tcp("127.0.0.1", 0);
  EXPECT_TRUE(listener);
  auto client = connect_tcp("127.0.0.1", *local_port(listener->get()), Deadline::after_ms(2000));
  EXPECT_TRUE(client) << client.status().message;
  return {std::move(*client), accept_within(listener->get())};
}

// Drives both ends until `done` or five seconds have passed.
template <typename Done>
void pump(Done done) {
  const Deadline deadline = Deadline::after_ms(5000);
  while (!done() && !deadline.expired()) std::this_thread::yield();
}

std::vector<std::byte> random_bytes(size_t size, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::byte> bytes(size);
  for (auto& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

void expect_bytes_cross(Stream& from, Stream& to, size_t size) {
  const auto sent = random_bytes(size, size);
  std::vector<std::byte> got(size);
  size_t written = 0;
  size_t read = 0;
  pump([&] {
    if (written < size) {
      const size_t half = (size - written) / 2;
      const ConstSlice pieces[] = {
          {sent.data() + written, half}, {}, {sent.data() + written + half, size - written - half}};
      const auto result = from.write_some(pieces);
      EXPECT_NE(result.state, IoState::kFailed) << from.error().message;
      if (result.state == IoState::kMoved) written += result.bytes;
    }
    const size_t third = (size - read) / 3;
    const Slice pieces[] = {{got.data() + read, third}, {got.data() + read + third, size - read - third}};
    const auto result = to.read_some(pieces);
    EXPECT_NE(result.state, IoState::kFailed) << to.error().message;
    if (result.state == IoState::kMoved) read += result.bytes;
    return read == size;
  });
  EXPECT_EQ(read, size);
  EXPECT_EQ(sent, got);
}

TEST(Socket, ConnectToNobodyFailsWithTheAddress) {
  auto listener = listen_tcp("127.0.0.1", 0);
  const uint16_t port = *local_port(listener->get());
  listener->reset();
  const auto refused = connect_tcp("127.0.0.1", port, Deadline::after_ms(1000));
  EXPECT_EQ(refused.code(), Code::kNodeUnavailable);
  EXPECT_NE(refused.status().message.find(std::to_string(port)), std::string::npos);
}

int tcp_option(int fd, int level, int name) {
  int value = -1;
  socklen_t size = sizeof value;
  EXPECT_EQ(getsockopt(fd, level, name, &value, &size), 0);
  return value;
}

TEST(Socket, BothEndsNoticeAHostThatIsGone) {
  const auto [client, server] = tcp_pair();
  for (const int fd : {client.get(), server.get()}) {
    EXPECT_EQ(tcp_option(fd, SOL_SOCKET, SO_KEEPALIVE), 1);
    EXPECT_EQ(tcp_option(fd, IPPROTO_TCP, TCP_KEEPIDLE), 5);
    EXPECT_EQ(tcp_option(fd, IPPROTO_TCP, TCP_KEEPINTVL), 5);
    EXPECT_EQ(tcp_option(fd, IPPROTO_TCP, TCP_KEEPCNT), 3);
    EXPECT_EQ(tcp_option(fd, IPPROTO_TCP, TCP_USER_TIMEOUT), 15'000);
  }
}

TEST(Socket, UnixSocketIsPrivateAndAStaleFileIsReplaced) {
  const TemporaryFolder folder;
  const std::string path = folder.file("node.sock");
  auto first = listen_unix(path);
  ASSERT_TRUE(first) << first.status().message;
  struct stat info {};
  ASSERT_EQ(stat(path.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600u);
  EXPECT_EQ(listen_unix(path).code(), Code::kInvalidArgument) << "a living listener must not be pushed aside";
  first->reset();
  EXPECT_TRUE(listen_unix(path)) << "a dead listener's file is replaced";
}

TEST(Socket, WaitEndsByCancelAndByDeadline) {
  int fds[2];
  ASSERT_EQ(pipe(fds), 0);
  auto [client, server] = tcp_pair();
  EXPECT_EQ(wait_ready(client.get(), POLLIN, fds[0], Deadline::after_ms(20)).code, Code::kDeadlineExceeded);
  ASSERT_EQ(write(fds[1], "x", 1), 1);
  EXPECT_EQ(wait_ready(client.get(), POLLIN, fds[0], Deadline::after_ms(2000)).code, Code::kCancelled);
  close(fds[0]);
  close(fds[1]);
}

TEST(Socket, DescriptorsCrossAUnixSocket) {
  const TemporaryFolder folder;
  auto listener = listen_unix(folder.file("s"));
  auto client = connect_unix(folder.file("s"), Deadline::after_ms(1000));
  ASSERT_TRUE(client) << client.status().message;
  const UniqueFd server = accept_within(listener->get());
  EXPECT_EQ(peer_credentials(server.get())->uid, getuid());

  const UniqueFd memory(memfd_create("passed", MFD_CLOEXEC));
  ASSERT_EQ(write(memory.get(), "block", 5), 5);
  const std::byte note[1] = {std::byte{1}};
  const int fds[] = {memory.get()};
  ASSERT_EQ(*send_with_fds(server.get(), note, fds), 1u);
  std::vector<UniqueFd> received;
  std::byte buffer[8];
  size_t count = 0;
  pump([&] {
    const auto result = receive_with_fds(client->get(), buffer, received);
    EXPECT_TRUE(result) << result.status().message;
    count = *result;
    return count > 0;
  });
  ASSERT_EQ(received.size(), 1u);
  char text[6] = {};
  EXPECT_EQ(pread(received[0].get(), text, 5, 0), 5);
  EXPECT_STREQ(text, "block");
}

TEST(PlainStream, MovesBytesThroughManySlicesAndSeesTheEnd) {
  auto [client_fd, server_fd] = tcp_pair();
  auto client = make_plain_stream(std::move(client_fd));
  auto server = make_plain_stream(std::move(server_fd));
  expect_bytes_cross(*client, *server, 3'000'017);
  expect_bytes_cross(*server, *client, 1);
  client.reset();
  std::byte byte;
  const Slice one[] = {{&byte, 1}};
  IoResult result{};
  pump([&] {
    result = server->read_some(one);
    return result.state != IoState::kWantRead;
  });
  EXPECT_EQ(result.state, IoState::kEnd);
}

// ---- TLS, with certificates made by the openssl command line tool

class Tls : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const Status tls = tls_availability(); !tls) GTEST_SKIP() << tls.message;
    const std::string make =
        "cd " + folder_.file("") +
        " && exec >/dev/null 2>&1 && "
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -keyout ca.key -out "
        "ca.pem "
        "-days 2 -subj /CN=test-ca && "
        "for n in server client; do openssl req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes "
        "-keyout $n.key "
        "-out $n.csr -subj /CN=$n && printf 'subjectAltName=IP:127.0.0.1,DNS:node.test' > ext && "
        "openssl x509 -req -in $n.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile ext -out "
        "$n.pem; done";
    if (std::system(make.c_str()) != 0) GTEST_SKIP() << "the openssl command line tool is not usable here";
  }

  TlsConfig identity(const std::string& name, bool trust = true) const {
    return {folder_.file(name + ".pem"), folder_.file(name + ".key"), trust ? folder_.file("ca.pem") : ""};
  }

  // Runs both handshakes; returns the first failure.
  static Status handshake(Stream& client, Stream& server) {
    bool client_done = false;
    bool server_done = false;
    Status failure;
    pump([&] {
      for (auto [stream, done] : {std::pair{&client, &client_done}, std::pair{&server, &server_done}}) {
        if (*done) continue;
        const auto result = stream->handshake();
        if (result.state == IoState::kMoved) *done = true;
        if (result.state == IoState::kEnd) failure = {Code::kTlsError, "end of stream"};
        if (result.state == IoState::kFailed) failure = stream->error();
      }
      return !failure.is_ok() || (client_done && server_done);
    });
    if (!failure) return failure;
    return client_done && server_done ? Status::ok() : Status{Code::kDeadlineExceeded, "handshake stuck"};
  }

  TemporaryFolder folder_;
};

TEST_F(Tls, BytesCrossAndBothSidesAreChecked) {
  auto server_context = make_tls_context(identity("server"), true);
  ASSERT_TRUE(server_context) << server_context.status().message;
  auto client_context = make_tls_context(identity("client"), false);
  ASSERT_TRUE(client_context) << client_context.status().message;
  auto [client_fd, server_fd] = tcp_pair();
  auto client = (*client_context)->wrap(std::move(client_fd), "127.0.0.1");
  auto server = (*server_context)->wrap(std::move(server_fd), "");
  ASSERT_TRUE(client && server);
  const Status done = handshake(**client, **server);
  ASSERT_TRUE(done) << done.message;
  expect_bytes_cross(**client, **server, 1'000'003);
  expect_bytes_cross(**server, **client, 77);
}

TEST_F(Tls, WrongPeerNameIsRefused) {
  auto server_context = make_tls_context(identity("server", false), true);
  TlsConfig trust;
  trust.ca_file = folder_.file("ca.pem");
  auto client_context = make_tls_context(trust, false);
  auto [client_fd, server_fd] = tcp_pair();
  auto client = (*client_context)->wrap(std::move(client_fd), "other.test");
  auto server = (*server_context)->wrap(std::move(server_fd), "");
  EXPECT_EQ(handshake(**client, **server).code, Code::kTlsError);
}

TEST_F(Tls, MutualTlsRefusesAClientWithoutCertificate) {
  auto server_context = make_tls_context(identity("server"), true);
  TlsConfig trust;
  trust.ca_file = folder_.file("ca.pem");
  auto client_context = make_tls_context(trust, false);
  auto [client_fd, server_fd] = tcp_pair();
  auto client = (*client_context)->wrap(std::move(client_fd), "127.0.0.1");
  auto server = (*server_context)->wrap(std::move(server_fd), "");
  // In TLS 1.3 the client may finish first; the server then refuses.
  EXPECT_NE(handshake(**client, **server).code, Code::kOk);
}

TEST_F(Tls, BadFilesAreNamed) {
  TlsConfig config = identity("server");
  config.key_file = folder_.file("client.key");
  EXPECT_EQ(make_tls_context(config, true).code(), Code::kTlsError);
  config.certificate_file = folder_.file("absent.pem");
  const auto missing = make_tls_context(config, true);
  EXPECT_NE(missing.status().message.find("absent.pem"), std::string::npos);
  EXPECT_EQ(make_tls_context({}, true).code(), Code::kTlsError);
  EXPECT_EQ(make_tls_context({}, false).code(), Code::kTlsError);
}

}  // namespace
}  // namespace mooncache::net
