// What one node writes into the shared directory, another one reads: all of it sound, or a miss.
#include "store/disk/shared_index.h"
#include "store/shared_fixture.h"

namespace mooncache::test {
namespace {

constexpr uint64_t kLogSegmentBytes = 512 << 10;  // as the fixture's devices have them

TEST_F(SharedTest, AnotherNodesBlocksAreFoundWhileItWrites) {
  open_writer();
  write(0, 5);  // less than a segment: there is no footer
  open_reader();
  ASSERT_TRUE(wait([&] { return knows(4); }));
  EXPECT_EQ(got(0, 5), 5u);
  write(5, 60);
  ASSERT_TRUE(wait([&] { return knows(59); }));
  EXPECT_EQ(got(0, 60), 60u);
  EXPECT_FALSE(get(60));
  const SharedStats stats = reader_->stats();
  EXPECT_EQ(stats.writers, 1u);
  EXPECT_EQ(stats.reads, 65u);
  EXPECT_EQ(stats.read_bytes, 65 * kSize);
  EXPECT_EQ(stats.blocks, 60u);
}

TEST_F(SharedTest, BlocksOfAWriterThatIsGoneStayReadable) {
  open_writer();
  write(0, 60);
  device_.reset();
  open_reader();
  ASSERT_TRUE(wait([&] { return knows(59); }));
  EXPECT_EQ(got(0, 60), 60u);
  // It comes back, and takes its own log over.
  open_writer();
  EXPECT_EQ(device_->stats().recovered, 60u);
  write(60, 80);
  ASSERT_TRUE(wait([&] { return knows(79); }));
  EXPECT_EQ(got(0, 80), 80u);
}

TEST_F(SharedTest, TornFootersCostNothing) {
  open_writer();
  write(0, 60);
  device_.reset();
  const std::vector<std::byte> zeros(4096);
  for (uint64_t number = 0; number < 10; ++number)
    change(store::disk::kDataOffset + (number + 1) * kLogSegmentBytes - zeros.size(), zeros);
  open_reader();
  ASSERT_TRUE(wait([&] { return knows(59); }));
  EXPECT_EQ(got(0, 60), 60u);
}

TEST_F(SharedTest, ChangedBytesAreMisses) {
  open_writer();
  write(0, 60);
  device_.reset();
  open_reader();
  ASSERT_TRUE(wait([&] { return knows(59); }));
  // In each block, wherever it lies: there is one in every 40,000 bytes.
  const uint64_t bytes = std::filesystem::file_size(log_of("node-1"));
  for (uint64_t at = store::disk::kDataOffset + 10'000; at < bytes; at += 30'000)
    change(at, std::vector<std::byte>(8, std::byte{0x5a}));
  EXPECT_EQ(got(0, 60), 0u);
  EXPECT_EQ(reader_->stats().corrupt + reader_->stats().stale, 60u);
  EXPECT_GT(reader_->stats().corrupt, 30u);
  EXPECT_TRUE(above_.wait_event("shared_block_corrupt"));
  EXPECT_EQ(above_.open_reservations(), 0u);
  EXPECT_FALSE(knows(5)) << "it is not asked for again";
}

TEST_F(SharedTest, ForeignFilesAreLeftAlone) {
  open_writer();
  write(0, 20);
  device_.reset();
  std::filesystem::copy_file(log_of("node-1"), log_of("node-3"));  // a copy is no second writer
  std::ofstream(log_of("text")) << std::string(200'000, 'x');
  std::ofstream(log_of("short")) << "x";
  std::ofstream((folder_ / "README").string()) << "notes";
  std::filesystem::create_directory(log_of("folder"));
  ASSERT_EQ(::mkfifo(log_of("fifo").c_str(), 0600), 0);
  std::filesystem::create_symlink(log_of("node-1"), log_of("link"));
  open_reader();
  ASSERT_TRUE(wait([&] { return knows(19); }));
  wait_for_scan();
  const SharedStats stats = reader_->stats();
  EXPECT_EQ(stats.writers, 1u);
  EXPECT_EQ(stats.refused_files, 6u);
  EXPECT_EQ(stats.blocks, 20u);
  EXPECT_EQ(stats.answering, 1u);
  EXPECT_TRUE(above_.wait_event("shared_file_refused"));
  EXPECT_EQ(got(0, 20), 20u);
}

TEST_F(SharedTest, RemovedBlocksGoWithTheNextScanAndDoNotComeBack) {
  open_writer();
  write(0, 60);
  open_reader();
  ASSERT_TRUE(wait([&] { return knows(59); }));
  ASSERT_TRUE(remove(3));
  ASSERT_TRUE(remove(58));
  ASSERT_TRUE(wait([&] { return !knows(3) && !knows(58); }));
  write(60, 120);  // the segments of the removals and of what they removed are closed
  ASSERT_TRUE(wait([&] { return knows(119); }));
  EXPECT_FALSE(get(3));
  EXPECT_FALSE(get(58));
  EXPECT_EQ(got(0, 120), 118u);
  reader_.reset();
  open_reader();
  ASSERT_TRUE(wait([&] { return knows(119); }));
  EXPECT_FALSE(knows(3)) << "a start reads removals, too";
}

TEST_F(SharedTest, PurgedBlocksAreGoneBeforeTheNextScan) {
  open_writer();
  write(0, 20);
  open_reader(1 << 20, 60'000, 600'000);  // one scan alone
  ASSERT_TRUE(wait([&] { return knows(19); }));
  ASSERT_TRUE(device_->purge(kTenant, key_of(7)).is_ok());
  EXPECT_FALSE(get(7)) << "its bytes are overwritten";
  EXPECT_TRUE(get(8));
}

// In a segment that is still written there is no footer: whoever reads it walks from record to record.
TEST_F(SharedTest, APurgedRecordHidesNothingBehindIt) {
  open_writer();
  write(0, 6);
  ASSERT_TRUE(device_->purge(kTenant, key_of(3)).is_ok());
  write(6, 8);
  ASSERT_TRUE(remove(1));
  open_reader();
  ASSERT_TRUE(wait([&] { return knows(7); }));
  EXPECT_FALSE(knows(3));
  EXPECT_FALSE(knows(1)) << "the removal lies behind";
  EXPECT_EQ(got(0, 8), 6u);
}

TEST_F(SharedTest, WhatAReaderForgotStaysForgotten) {
  open_writer();
  write(0, 20);
  open_reader();
  ASSERT_TRUE(wait([&] { return knows(19); }));
  EXPECT_TRUE(reader_->forget(kTenant, key_of(7)));
  EXPECT_FALSE(reader_->forget(kTenant, key_of(7)));
  write(20, 60);  // the footer of its segment names it
  ASSERT_TRUE(wait([&] { return knows(59); }));
  EXPECT_FALSE(get(7));
  reader_->forget(kTenant);
  wait_for_scan();
  EXPECT_EQ(reader_->stats().blocks, 0u);
}

// The log is full, and goes round several times: what is read is sound, what is gone is a miss.
TEST_F(SharedTest, SegmentsAreUsedAgainBelowAReader) {
  open_writer(4 * kMiB);
  open_reader();
  size_t found = 0;
  for (uint64_t round = 0; round < 12; ++round) {
    write(round * 40, round * 40 + 40);
    for (uint64_t i = 0; i < round * 40 + 40; i += 7) found += get(i) ? 1 : 0;
  }
  EXPECT_GT(found, 20u);
  EXPECT_GT(device_->stats().reclaimed, 100u);
  ASSERT_TRUE(wait([&] { return reader_->stats().blocks <= device_->stats().blocks; }));
  EXPECT_EQ(above_.open_reservations(), 0u);
}

TEST_F(SharedTest, AFileSystemThatIsFullCostsWritesAlone) {
  faulty_ = true;
  open_writer();
  write(0, 20);
  faults_->write_error = ENOSPC;
  for (uint64_t i = 20; i < 40; ++i) memory_->offer(i, kSize);
  open_reader();
  ASSERT_TRUE(wait([&] { return knows(19); }));
  ASSERT_TRUE(wait([&] { return device_->stats().no_space > 0; }));
  EXPECT_EQ(got(0, 40), 20u);
  EXPECT_TRUE(device_->answering());
  faults_->write_error = 0;
  memory_->offer(100, kSize);
  EXPECT_TRUE(wait([&] { return knows(100); }));
}

TEST_F(SharedTest, FailuresAreMissesUntilAWholeScan) {
  open_writer();
  write(0, 20);
  open_reader();
  for (const int error : {ESTALE, EIO, EACCES}) {
    ASSERT_TRUE(wait([&] { return knows(19); }));
    shared_faults_->read_error = error;
    EXPECT_EQ(got(0, 20), 0u);
    EXPECT_GT(reader_->stats().io_errors, 0u);
    shared_faults_->read_error = 0;
    ASSERT_TRUE(wait([&] { return get(5); })) << error;
  }
  shared_faults_->short_reads = true;
  EXPECT_FALSE(get(3));
  shared_faults_->short_reads = false;
  ASSERT_TRUE(wait([&] { return get(3); }));
  shared_faults_->list_error = EIO;
  ASSERT_TRUE(wait([&] { return reader_->stats().answering == 0; }));
  EXPECT_FALSE(get(3));
  EXPECT_TRUE(above_.wait_event("shared_off"));
  shared_faults_->list_error = 0;
  EXPECT_TRUE(wait([&] { return get(3); }));
  EXPECT_EQ(above_.open_reservations(), 0u);
}

TEST_F(SharedTest, ASlowServerIsNoServer) {
  open_writer();
  write(0, 20);
  open_reader(1 << 20, 50);
  ASSERT_TRUE(wait([&] { return knows(19); }));
  shared_faults_->hang();
  ASSERT_TRUE(wait([&] { return reader_->stats().answering == 0; })) << "its scan hangs";
  EXPECT_GE(reader_->stats().stalls, 1u);
  EXPECT_FALSE(get(3)) << "a miss at once";
  EXPECT_TRUE(above_.wait_event("shared_stalled"));
  shared_faults_->go_on();
  EXPECT_TRUE(wait([&] { return get(3); }));
}

// What hangs when the node ends is left behind, and whoever waits for a block hears of it.
TEST_F(SharedTest, TheEndDoesNotWaitForACallThatHangs) {
  open_writer();
  write(0, 20);
  open_reader();
  ASSERT_TRUE(wait([&] { return knows(19); }));
  shared_faults_->hang();
  auto done = std::make_shared<std::promise<void>>();
  ASSERT_TRUE(reader_->fetch(kTenant, key_of(3), [done] { done->set_value(); }));
  shared_faults_->wait_until_one_hangs();
  reader_->close();
  EXPECT_EQ(done->get_future().wait_for(std::chrono::seconds(0)), std::future_status::ready);
  reader_.reset();
  shared_faults_->go_on();
  EXPECT_EQ(above_.open_reservations(), 0u);
}

TEST_F(SharedTest, TheIndexIsBounded) {
  open_writer();
  write(0, 60);
  open_reader(10);
  ASSERT_TRUE(wait([&] { return reader_->stats().left_out >= 50; }));
  EXPECT_EQ(reader_->stats().blocks, 10u);
  EXPECT_EQ(got(0, 60), 10u);
}

TEST(SharedIndexOfOthers, ARemovalIsOfItsOwnLogAlone) {
  store::disk::SharedIndex index(1, 100);
  const auto record = [](uint64_t number, bool removal) {
    store::disk::RecordHeader header;
    header.key = key_of(number);
    header.tenant = kTenant;
    header.size = removal ? 0 : 100;
    header.flags = removal ? store::disk::RecordHeader::kRemoval : 0;
    return header;
  };
  const uint32_t mine = index.add_place(0, 0, 1), later = index.add_place(0, 1, 2);
  const uint32_t other = index.add_place(1, 0, 1);
  index.take(mine, record(1, false), 64, true, 64);
  index.take(mine, record(2, false), 70, true, 64);
  index.take(other, record(1, true), 64, true, 64);
  EXPECT_TRUE(index.find(kTenant, key_of(1)).has_value()) << "the other log cannot remove it";
  index.take(later, record(1, true), 64, true, 64);
  EXPECT_FALSE(index.find(kTenant, key_of(1)).has_value());
  index.take(mine, record(1, false), 64, true, 128);
  EXPECT_FALSE(index.find(kTenant, key_of(1)).has_value()) << "its footer says what was known before";
  index.drop_place(mine);
  EXPECT_FALSE(index.find(kTenant, key_of(2)).has_value()) << "at once";
  EXPECT_EQ(index.blocks(), 1u);
  EXPECT_EQ(index.sweep(0), 0u);
  index.end_sweep();
  EXPECT_EQ(index.blocks(), 0u);
  EXPECT_EQ(index.add_place(2, 0, 9), mine) << "it is used again";
}

}  // namespace
}  // namespace mooncache::test
