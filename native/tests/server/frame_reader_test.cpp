// Frames come out the same however their bytes are cut.
#include "server/frame_reader.h"

#include <gtest/gtest.h>

#include <random>

namespace mooncache::testing {
namespace {

using server::FrameReader;
using Bytes = std::vector<std::byte>;
using Step = FrameReader::Step;

Bytes frame(uint64_t request_id, size_t meta_bytes) {
  const Bytes meta(meta_bytes, std::byte(request_id));
  wire::FrameHeader header;
  header.request_id = request_id;
  const auto head = wire::encode_header(header, meta);
  Bytes all(head.begin(), head.end());
  all.insert(all.end(), meta.begin(), meta.end());
  return all;
}

std::optional<size_t> meta_bytes(FrameReader::Header header) {
  const auto decoded = wire::decode_header(header);
  return decoded ? std::optional<size_t>(decoded->meta_bytes) : std::nullopt;
}

struct Frames {
  FrameReader reader;
  std::vector<Bytes> whole;
  bool refused = false;

  void note(Step step) {
    refused = refused || step == Step::kRefused;
    if (step != Step::kFrame) return;
    const auto header = reader.header();
    Bytes all(header.begin(), header.end());
    all.insert(all.end(), reader.meta().begin(), reader.meta().end());
    whole.push_back(all);
    reader.release();
  }
  void take(std::span<const std::byte> bytes) {
    while (!bytes.empty() && !refused) note(reader.take(bytes, meta_bytes));
  }
  // As a connection reads what is long: into the reader's own memory.
  void read(std::span<const std::byte> bytes) {
    while (!bytes.empty() && !refused) {
      if (!reader.partial()) {
        take(bytes.first(1));
        bytes = bytes.subspan(1);
        continue;
      }
      const Slice room = reader.room();
      const size_t count = std::min(room.size, bytes.size());
      std::memcpy(room.data, bytes.data(), count);
      bytes = bytes.subspan(count);
      note(reader.filled(count, meta_bytes));
    }
  }
};

TEST(FrameReader, FramesAreTheSameHoweverTheirBytesAreCut) {
  std::mt19937 random(1);
  for (int round = 0; round < 300; ++round) {
    std::vector<Bytes> sent;
    Bytes stream;
    for (uint64_t i = 0; i < 1 + random() % 6; ++i) {
      const size_t sizes[] = {0, 1, 31, 32, 33, 4096, 70'000, 200'000};
      sent.push_back(frame(i, sizes[random() % std::size(sizes)]));
      stream.insert(stream.end(), sent.back().begin(), sent.back().end());
    }
    Frames got;
    for (size_t at = 0; at < stream.size();) {
      const size_t most[] = {1, 31, 33, 1000, 100'000, stream.size()};
      const size_t count = std::min(stream.size() - at, 1 + random() % most[random() % std::size(most)]);
      const auto part = std::span(stream).subspan(at, count);
      random() % 2 == 0 ? got.take(part) : got.read(part);
      at += count;
    }
    ASSERT_FALSE(got.refused);
    ASSERT_EQ(got.whole, sent) << "round " << round;
    ASSERT_FALSE(got.reader.partial());
  }
}

TEST(FrameReader, AWholeFrameIsLookedAtInPlace) {
  const Bytes two = [] {
    Bytes bytes = frame(1, 5);
    const Bytes next = frame(2, 0);
    bytes.insert(bytes.end(), next.begin(), next.end());
    return bytes;
  }();
  FrameReader reader;
  std::span<const std::byte> rest(two);
  ASSERT_EQ(reader.take(rest, meta_bytes), Step::kFrame);
  EXPECT_EQ(reader.header().data(), two.data());
  EXPECT_EQ(reader.meta().size(), 5u);
  EXPECT_EQ(rest.size(), wire::kHeaderBytes);
  EXPECT_EQ(reader.held_bytes(), 0u);
  ASSERT_EQ(reader.take(rest, meta_bytes), Step::kFrame);
  EXPECT_TRUE(reader.meta().empty());
}

TEST(FrameReader, MemoryGrowsWithWhatHasArrived) {
  const Bytes large = frame(1, wire::kMaxMetaBytes);
  FrameReader reader;
  std::span<const std::byte> some(large.data(), 1000);
  ASSERT_EQ(reader.take(some, meta_bytes), Step::kMore);
  EXPECT_TRUE(reader.partial());
  EXPECT_LE(reader.held_bytes(), 64u << 10);
  reader.clear();
  EXPECT_FALSE(reader.partial());
  EXPECT_EQ(reader.held_bytes(), 0u);
}

TEST(FrameReader, ARefusedHeaderEndsIt) {
  Bytes bad = frame(1, 0);
  bad[0] = std::byte{0};
  for (const size_t cut : {size_t{0}, size_t{1}, size_t{31}}) {
    Frames got;
    got.take(std::span(bad).first(cut));
    got.take(std::span(bad).subspan(cut));
    EXPECT_TRUE(got.refused) << cut;
    EXPECT_TRUE(got.whole.empty());
  }
}

}  // namespace
}  // namespace mooncache::testing
