// Which frames writes become: small ones of several reservations share one where the node takes that.
#include "transport/transfer_program.h"

#include <gtest/gtest.h>

#include <vector>

namespace mooncache {
namespace {

constexpr size_t kSmall = 1000;

class TransferProgramTest : public ::testing::Test {
 protected:
  void add(TransferProgram& program, uint64_t grant, Slice local, Direction direction = Direction::kWrite) {
    locals_.push_back(std::make_unique<Slice>(local));
    TransferProgram::Item item;
    item.transfer.id = program.items.size();
    item.transfer.direction = direction;
    item.transfer.remote.grant = grant;
    item.transfer.offset = 7;
    item.transfer.local = std::span(locals_.back().get(), 1);
    item.length = local.size;
    program.items.push_back(item);
  }
  // Sends the next frame. How many ranges it has; 0: there is none to send.
  size_t send(TransferProgram& program) {
    request_.clear();
    if (!program.next(request_)) return 0;
    if (request_.flags != wire::kFlagSeveral) return 1;
    const auto ranges = wire::decode_all_items<wire::ReservedRange>(request_.meta.view());
    ranges_ = ranges.value_or(std::vector<wire::ReservedRange>{});
    return ranges_.size();
  }
  // Answers the oldest frame with these codes.
  static Status answer(TransferProgram& program, std::vector<Code> codes) {
    Writer out;
    wire::encode_codes(out, codes);
    Reader in(out.view());
    wire::FrameHeader header;
    header.opcode = wire::Opcode::kWrite;
    PayloadSink sink;
    Status status = program.on_response(header, Status::ok(), in, sink);
    if (status) program.on_payload({});
    return status;
  }
  std::vector<std::byte> bytes_{3 << 20, std::byte{5}};
  std::vector<std::unique_ptr<Slice>> locals_;
  Request request_;
  std::vector<wire::ReservedRange> ranges_;
};

TEST_F(TransferProgramTest, SmallWritesShareAFrame) {
  TransferProgram program(true);
  for (uint64_t grant = 1; grant <= 3; ++grant) add(program, grant, {bytes_.data(), kSmall});
  ASSERT_EQ(send(program), 3u);
  EXPECT_EQ(ranges_[2].reservation, 3u);
  EXPECT_EQ(ranges_[2].range.offset, 7u);
  EXPECT_EQ(request_.payload.size(), 3u);
  EXPECT_EQ(send(program), 0u);
  ASSERT_TRUE(answer(program, {Code::kOk, Code::kReservationUnknown, Code::kOk}));
  EXPECT_TRUE(program.finished());
  EXPECT_EQ(program.items[0].code, Code::kOk);
  EXPECT_EQ(program.items[1].code, Code::kReservationUnknown);
  EXPECT_EQ(program.items[1].moved, 0u);
  EXPECT_EQ(program.items[2].moved, kSmall);
  EXPECT_TRUE(program.items[2].over());
}

TEST_F(TransferProgramTest, AnOldNodeGetsEachForItself) {
  TransferProgram program;
  for (uint64_t grant = 1; grant <= 3; ++grant) add(program, grant, {bytes_.data(), kSmall});
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(send(program), 1u);
    EXPECT_EQ(request_.flags, 0);
    EXPECT_TRUE(wire::WriteRequest::decode(request_.meta.view()));
  }
  EXPECT_EQ(send(program), 0u);
}

TEST_F(TransferProgramTest, AFrameEndsInTheMiddleOfALongWriteAndBeforeARead) {
  TransferProgram program(true);
  add(program, 1, {bytes_.data(), kSmall});
  add(program, 2, {bytes_.data(), 3 << 20});
  add(program, 3, {bytes_.data(), kSmall});
  add(program, 4, {bytes_.data(), kSmall}, Direction::kRead);
  EXPECT_EQ(send(program), 2u);
  EXPECT_EQ(ranges_[1].range.length, (1u << 20) - kSmall);
  EXPECT_EQ(send(program), 1u);
  EXPECT_EQ(send(program), 1u);
  EXPECT_EQ(send(program), 2u);
  EXPECT_EQ(ranges_[0].range.length, kSmall);
  EXPECT_EQ(ranges_[0].range.offset, 7u + (3u << 20) - kSmall);
  EXPECT_EQ(send(program), 1u);
  EXPECT_EQ(request_.opcode, wire::Opcode::kRead);
}

TEST_F(TransferProgramTest, AnAnswerWithAnotherNumberOfCodesBreaksTheProtocol) {
  TransferProgram program(true);
  add(program, 1, {bytes_.data(), kSmall});
  add(program, 2, {bytes_.data(), kSmall});
  ASSERT_EQ(send(program), 2u);
  EXPECT_EQ(answer(program, {Code::kOk}).code, Code::kProtocolError);
}

}  // namespace
}  // namespace mooncache
