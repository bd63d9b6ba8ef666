// One client, one real node, over TCP and over shared memory.
#include <sys/wait.h>

#include <thread>

#include "client/pool.h"
#include "compare.h"

namespace mooncache::testing {
namespace {

class ClientTest : public ::testing::TestWithParam<bool> {
 protected:
  ClientTest() : node_(0), client_(client_for({node_.info}, client_config(GetParam()))) {}
  TestNode node_;
  std::unique_ptr<Client> client_;
};

TEST_P(ClientTest, AllSizesComeBack) {
  for (const size_t size : {1u, 7u, 4096u, 65536u, 65537u, 1u << 20, (1u << 20) + 13, 64u << 20}) {
    const Key key = key_of(size);
    const auto source = bytes_of(size, size);
    const PutOutcome put = put_one(*client_, key, source);
    ASSERT_EQ(put.code, Code::kOk) << size;
    EXPECT_EQ(put.copies, 1u);
    std::vector<std::byte> copy(size + 5, std::byte{1});
    const GetOutcome got = get_one(*client_, key, copy);
    ASSERT_EQ(got.code, Code::kOk) << size;
    ASSERT_EQ(got.size, size);
    copy.resize(size);
    EXPECT_TRUE(same_bytes(copy, source)) << size;
    EXPECT_EQ(put_one(*client_, key, source).code, Code::kAlreadyExists);
  }
  EXPECT_EQ(stat_of(*client_, "shm_bytes") > 0, GetParam());
  EXPECT_GT(stat_of(*client_, GetParam() ? "unix_bytes" : "tcp_bytes"), 0u);
  EXPECT_EQ(get_one(*client_, key_of(99), {}).code, Code::kNotFound);
}

TEST_P(ClientTest, EmptyBlockIsRefusedWithACode) {
  EXPECT_EQ(put_one(*client_, key_of(1), {}).code, Code::kInvalidArgument);
}

TEST_P(ClientTest, BatchesOfManySlices) {
  const size_t count = 4096;
  std::vector<std::vector<std::byte>> sources;
  std::vector<std::vector<ConstSlice>> slices(count);
  std::vector<PutBlock> blocks;
  for (size_t i = 0; i < count; ++i) {
    sources.push_back(bytes_of(i, 1 + (i * 37) % 9000));
    const auto& bytes = sources.back();
    for (size_t at = 0; at < bytes.size();) {
      const size_t take = std::min(bytes.size() - at, 1 + (i * at) % 1777);
      slices[i].emplace_back(bytes.data() + at, take);
      if (i % 3 == 0) slices[i].emplace_back(nullptr, 0);
      at += take;
    }
    blocks.push_back({key_of(i), slices[i]});
  }
  std::vector<PutOutcome> puts(count);
  ASSERT_TRUE(client_->put(blocks, 1, {}, puts));
  std::vector<std::vector<std::byte>> copies(count);
  std::vector<std::array<Slice, 2>> destinations(count);
  std::vector<GetBlock> gets;
  for (size_t i = 0; i < count; ++i) {
    ASSERT_EQ(puts[i].code, Code::kOk) << i;
    copies[i].resize(sources[i].size());
    const size_t half = copies[i].size() / 2;
    destinations[i] = {Slice{copies[i].data(), half},
                       Slice{copies[i].data() + half, copies[i].size() - half}};
    gets.push_back({key_of(i), destinations[i]});
  }
  std::vector<GetOutcome> outcomes(count);
  ASSERT_TRUE(client_->get(gets, {}, {}, outcomes));
  for (size_t i = 0; i < count; ++i) {
    ASSERT_EQ(outcomes[i].code, Code::kOk) << i;
    ASSERT_TRUE(copies[i] == sources[i]) << i;
  }
}

TEST_P(ClientTest, RangesAndTooSmallDestinations) {
  const auto source = bytes_of(5, 300'000);
  ASSERT_EQ(put_one(*client_, key_of(5), source).code, Code::kOk);
  std::vector<std::byte> part(200'000);
  const GetOutcome small = get_one(*client_, key_of(5), part);
  EXPECT_EQ(small.code, Code::kBufferTooSmall);
  EXPECT_EQ(small.size, source.size());
  GetOptions range;
  range.whole = false;
  ASSERT_EQ(get_one(*client_, key_of(5), part, {}, range, 50'001).code, Code::kOk);
  EXPECT_TRUE(std::equal(part.begin(), part.end(), source.begin() + 50'001));
  const GetOutcome tail = get_one(*client_, key_of(5), part, {}, range, 299'990);
  EXPECT_EQ(tail.code, Code::kOk);
  EXPECT_EQ(tail.size, 10u);
}

TEST_P(ClientTest, AllocatesWhenTheSizeIsKnown) {
  const auto source = bytes_of(6, 70'000);
  ASSERT_EQ(put_one(*client_, key_of(6), source).code, Code::kOk);
  std::vector<std::byte> made;
  GetOptions how;
  how.allocate = [&](size_t, uint64_t size) {
    made.resize(size);
    return made.data();
  };
  EXPECT_EQ(get_one(*client_, key_of(6), {}, {}, how).code, Code::kOk);
  EXPECT_TRUE(made == source);
  how.allocate = [](size_t, uint64_t) -> std::byte* { return nullptr; };
  EXPECT_EQ(get_one(*client_, key_of(6), {}, {}, how).code, Code::kLimitExceeded);
}

TEST_P(ClientTest, ManyThreads) {
  std::vector<std::thread> threads;
  std::atomic<int> bad{0};
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&, t] {
      for (uint64_t i = 0; i < 30; ++i) {
        const uint64_t number = static_cast<uint64_t>(t) * 1000 + i;
        const auto source = bytes_of(number, 1000 + i * 9000);
        if (put_one(*client_, key_of(number), source).code != Code::kOk) ++bad;
        std::vector<std::byte> copy(source.size());
        if (get_one(*client_, key_of(number), copy).code != Code::kOk || copy != source) ++bad;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(bad.load(), 0);
}

TEST_P(ClientTest, CorruptBlockIsAMissNeverData) {
  for (const size_t size : {4096u, 1u << 20}) {
    const auto source = bytes_of(size, size);
    ASSERT_EQ(put_one(*client_, key_of(size), source).code, Code::kOk);
    ASSERT_EQ(node_.server->store().flip_bit(node_.tenant(), key_of(size), 12345), Code::kOk);
    std::vector<std::byte> copy(size);
    EXPECT_EQ(get_one(*client_, key_of(size), copy).code, Code::kChecksumMismatch);
  }
  EXPECT_EQ(stat_of(*client_, "miss_checksum"), 2u);
}

TEST_P(ClientTest, ControlCalls) {
  std::vector<Key> keys;
  for (uint64_t i = 0; i < 10; ++i) keys.push_back(key_of(i));
  for (const uint64_t i : {0u, 1u, 2u, 5u})
    ASSERT_EQ(put_one(*client_, keys[i], bytes_of(i, 100)).code, Code::kOk);
  const auto match = client_->match(keys, true, {});
  ASSERT_TRUE(match);
  EXPECT_EQ(match->leading_run, 3u);
  EXPECT_EQ(match->present, 4u);
  EXPECT_EQ(match->bitmap[0], std::byte{0b100111});
  std::vector<BlockStat> stats(10);
  ASSERT_TRUE(client_->stat(keys, {}, stats));
  EXPECT_EQ(stats[5].size, 100u);
  EXPECT_EQ(stats[4].code, Code::kNotFound);
  std::vector<Code> codes(10);
  ASSERT_TRUE(client_->pin(std::span(keys).first(2), 60'000, {}, std::span(codes).first(2)));
  EXPECT_EQ(codes[0], Code::kOk);
  ASSERT_TRUE(client_->remove(keys, {}, codes));
  EXPECT_EQ(codes[0], Code::kPinned);
  EXPECT_EQ(codes[2], Code::kOk);
  EXPECT_EQ(codes[9], Code::kNotFound);
  ASSERT_TRUE(client_->unpin(std::span(keys).first(2), {}, std::span(codes).first(2)));
  const auto page = client_->list(0, 0, 4096, {});
  ASSERT_TRUE(page);
  EXPECT_EQ(page->blocks.size(), 2u);
  EXPECT_TRUE(client_->node_stat(0, {}));
  EXPECT_TRUE(client_->ping(0, {}));
  EXPECT_EQ(client_->ping(77, {}).code(), Code::kUnknownNode);
}

TEST_P(ClientTest, ReservationsWriteRangesInAnyOrder) {
  const auto source = bytes_of(8, 3'000'000);
  auto reservation = client_->reserve(key_of(8), source.size(), {});
  ASSERT_TRUE(reservation) << reservation.status().message;
  const auto piece = [&](size_t offset, size_t size) { return ConstSlice(source.data() + offset, size); };
  const ConstSlice second[] = {piece(1'000'000, 500'000), piece(1'500'000, 1'500'000)};
  ASSERT_TRUE((*reservation)->write(1'000'000, second, {}));
  const ConstSlice first = piece(0, 1'000'000);
  EXPECT_EQ((*reservation)->write(2'900'000, std::span(&first, 1), {}).code, Code::kInvalidArgument);
  std::vector<std::byte> copy(source.size());
  EXPECT_EQ(get_one(*client_, key_of(8), copy).code, Code::kNotFound);
  ASSERT_TRUE((*reservation)->write(0, std::span(&first, 1), {}));
  const Status committed = (*reservation)->commit({});
  ASSERT_TRUE(committed) << committed.message;
  EXPECT_EQ((*reservation)->commit({}).code, Code::kClosed);
  ASSERT_EQ(get_one(*client_, key_of(8), copy).code, Code::kOk);
  EXPECT_TRUE(same_bytes(copy, source));

  auto half = client_->reserve(key_of(9), source.size(), {});
  ASSERT_TRUE(half);
  ASSERT_TRUE((*half)->write(0, std::span(&first, 1), {}));
  EXPECT_EQ((*half)->commit({}).code, Code::kIncomplete);
  auto dropped = client_->reserve(key_of(10), source.size(), {});
  ASSERT_TRUE(dropped);
  dropped->reset();
  EXPECT_TRUE(eventually([&] { return node_.server->store().stats().reservations == 0; }));
}

TEST_P(ClientTest, CancelledGetLeavesMemoryAlone) {
  const auto source = bytes_of(11, 64 << 20);
  ASSERT_EQ(put_one(*client_, key_of(11), source).code, Code::kOk);
  for (int delay_us = 0; delay_us < 20'000; delay_us += 2500) {
    CancelToken token;
    CallOptions options;
    options.cancel = &token;
    std::vector<std::byte> copy(source.size());
    std::thread canceller([&] {
      std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
      token.cancel();
    });
    const Code code = get_one(*client_, key_of(11), copy, options).code;
    std::fill(copy.begin(), copy.end(), std::byte{0xee});
    EXPECT_TRUE(code == Code::kCancelled || code == Code::kOk);
    canceller.join();
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    EXPECT_TRUE(all_bytes(copy, std::byte{0xee}));
  }
  std::vector<std::byte> copy(source.size());
  EXPECT_EQ(get_one(*client_, key_of(11), copy).code, Code::kOk);
  EXPECT_TRUE(same_bytes(copy, source));
}

TEST_P(ClientTest, RestartedNodeIsFoundAgain) {
  ASSERT_EQ(put_one(*client_, key_of(1), bytes_of(1, 5000)).code, Code::kOk);
  const uint16_t port = node_.info.tcp_port;
  node_.stop();
  std::vector<std::byte> copy(5000);
  const Code down = get_one(*client_, key_of(1), copy).code;
  EXPECT_TRUE(down == Code::kNodeUnavailable || down == Code::kConnectionLost) << code_name(down);
  node_.config.tcp_port = port;
  node_.config.incarnation += 1;
  node_.start();
  client_->set_map(2, {node_.info});
  EXPECT_EQ(get_one(*client_, key_of(1), copy).code, Code::kNotFound);
  EXPECT_EQ(put_one(*client_, key_of(1), bytes_of(1, 5000)).code, Code::kOk);
}

TEST_P(ClientTest, FullNodeAnswersInTime) {
  CallOptions options;
  options.deadline = Deadline::after_ms(400);
  const auto source = bytes_of(1, 200 << 20);
  auto reservation = client_->reserve(key_of(1), source.size(), {});
  ASSERT_TRUE(reservation);
  const Code code = put_one(*client_, key_of(2), source, 1, options).code;
  EXPECT_TRUE(code == Code::kNoSpace || code == Code::kDeadlineExceeded) << code_name(code);
}

TEST_P(ClientTest, ForkedChildIsRefusedWithASentence) {
  ASSERT_EQ(put_one(*client_, key_of(1), bytes_of(1, 100)).code, Code::kOk);
  const pid_t child = fork();
  if (child == 0) {
    std::vector<std::byte> copy(100);
    const Code code = get_one(*client_, key_of(1), copy).code;
    client_.reset();
    _exit(code == Code::kClosed ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(WEXITSTATUS(status), 0);
  std::vector<std::byte> copy(100);
  EXPECT_EQ(get_one(*client_, key_of(1), copy).code, Code::kOk);
}

TEST_P(ClientTest, ClosedClientSaysSo) {
  client_->close();
  std::vector<std::byte> copy(100);
  EXPECT_EQ(get_one(*client_, key_of(1), copy).code, Code::kClosed);
  EXPECT_EQ(client_->match({}, false, {}).code(), Code::kClosed);
}

TEST_P(ClientTest, WrongSecretIsUnauthenticated) {
  ClientConfig config = client_config(GetParam());
  config.credentials.key[0] ^= std::byte{1};
  auto stranger = client_for({node_.info}, config);
  std::vector<std::byte> copy(100);
  for (int i = 0; i < 6; ++i)
    EXPECT_EQ(get_one(*stranger, key_of(1), copy).code, Code::kUnauthenticated) << i;
  EXPECT_EQ(put_one(*stranger, key_of(1), copy).code, Code::kUnauthenticated);
}

INSTANTIATE_TEST_SUITE_P(Routes, ClientTest, ::testing::Values(false, true),
                         [](const auto& test) { return test.param ? "shm" : "tcp"; });

}  // namespace
}  // namespace mooncache::testing
