#include "mooncache/bytes.h"

#include <gtest/gtest.h>

#include "mooncache/status.h"

namespace mooncache {
namespace {

TEST(Reader, RoundTripsWhatWriterWrote) {
  Writer writer;
  Key key;
  key.bytes[31] = std::byte{7};
  writer.u8(1);
  writer.u16(0xbeef);
  writer.u32(0xdeadbeef);
  writer.u64(0x0123456789abcdef);
  writer.key(key);
  writer.str16("tenant");
  Reader reader(writer.view());
  EXPECT_EQ(reader.u8(), 1);
  EXPECT_EQ(reader.u16(), 0xbeef);
  EXPECT_EQ(reader.u32(), 0xdeadbeef);
  EXPECT_EQ(reader.u64(), 0x0123456789abcdefu);
  EXPECT_EQ(reader.key(), key);
  EXPECT_EQ(reader.str16(), "tenant");
  EXPECT_TRUE(reader.done());
}

TEST(Reader, OneShortTakeFailsAllLaterOnes) {
  Writer writer;
  writer.u32(5);
  Reader reader(writer.view());
  EXPECT_EQ(reader.u64(), 0u);
  EXPECT_FALSE(reader.ok());
  EXPECT_EQ(reader.u8(), 0) << "bytes that were there must not be read after a failure";
  EXPECT_FALSE(reader.done());
}

TEST(Reader, StringLongerThanTheBufferIsRefused) {
  Writer writer;
  writer.u16(100);
  writer.u8('x');
  Reader reader(writer.view());
  EXPECT_EQ(reader.str16(), "");
  EXPECT_FALSE(reader.ok());
}

TEST(Status, EveryCodeHasAName) {
  EXPECT_EQ(code_name(Code::kNotFound), "NOT_FOUND");
  EXPECT_EQ(code_name(static_cast<Code>(12345)), "UNKNOWN");
}

}  // namespace
}  // namespace mooncache
