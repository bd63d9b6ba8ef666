// Blocks of a tenant with a key: no disk has their bytes, and nothing but what was written comes back,
// whatever is done to the file or to the keys.
#include <string.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "store/disk/keyring.h"
#include "store/disk/record_cipher.h"
#include "store/shared_fixture.h"

namespace mooncache::test {
namespace {

using namespace store::disk;

RawKey raw_key(uint8_t number) {
  RawKey key;
  key.fill(std::byte{number});
  return key;
}

std::vector<std::byte> from_hex(const std::string& hex) {
  std::vector<std::byte> bytes;
  for (size_t at = 0; at < hex.size(); at += 2)
    bytes.push_back(static_cast<std::byte>(std::stoi(hex.substr(at, 2), nullptr, 16)));
  return bytes;
}

// The examples of the specification, https://c2sp.org/XAES-256-GCM.
TEST(RecordCipher, IsXaes256Gcm) {
  const auto crypto = libcrypto();
  ASSERT_TRUE(crypto) << crypto.status().message;
  struct Example {
    uint8_t key;
    std::string associated, encrypted, tag;
  };
  const Example examples[] = {
      {1, "", "ce546ef63c9cc60765923609", "b33a9a1974e96e52daf2fcf7075e2271"},
      {3, "c2sp.org/XAES-256-GCM", "986ec1832593df5443a17943", "7fd083bf3fdb41abd740a21f71eb769d"}};
  Nonce nonce;
  std::memcpy(nonce.data(), "ABCDEFGHIJKLMNOPQRSTUVWX", nonce.size());
  RecordCipher cipher;
  for (const Example& example : examples) {
    const TenantKey key(**crypto, raw_key(example.key));
    std::vector<std::byte> bytes(12);
    std::memcpy(bytes.data(), "XAES-256-GCM", bytes.size());
    const auto plain = bytes;
    const auto associated = std::as_bytes(std::span(example.associated));
    Tag tag{};
    ASSERT_TRUE(cipher.begin_encryption(key, nonce) && cipher.authenticate(associated));
    // In pieces, as a record lies in several chunks.
    ASSERT_TRUE(cipher.crypt(std::span(bytes).first(5)) && cipher.crypt(std::span(bytes).subspan(5)));
    ASSERT_TRUE(cipher.end_encryption(tag));
    EXPECT_EQ(bytes, from_hex(example.encrypted));
    EXPECT_TRUE(std::ranges::equal(tag, from_hex(example.tag)));
    ASSERT_TRUE(cipher.begin_decryption(key, nonce) && cipher.authenticate(associated));
    ASSERT_TRUE(cipher.crypt(bytes) && cipher.end_decryption(tag));
    EXPECT_EQ(bytes, plain);
  }
}

class EncryptionTest : public SharedTest {
 protected:
  static constexpr size_t kBytes = 5000;

  void SetUp() override {
    SharedTest::SetUp();
    ASSERT_TRUE(keys_->set(kTenant, {raw_key(1)}));
  }
  // A node's start: with this keyring.
  void start(std::shared_ptr<Keyring> keys) {
    keys_ = std::move(keys);
    DeviceOptions with = options();
    with.keyring = keys_;
    ASSERT_TRUE(open(with));
  }
  void start() { start(std::move(keys_)); }
  void write_blocks(uint64_t from, uint64_t until, size_t size = kBytes) {
    const size_t before = memory_->written_count();
    for (uint64_t i = from; i < until; ++i) memory_->offer(i, size);
    ASSERT_TRUE(memory_->wait_written(before + (until - from)));
  }
  std::vector<std::byte> raw_file() const {
    std::vector<std::byte> bytes(std::filesystem::file_size(file()));
    std::ifstream in(file(), std::ios::binary);
    in.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
    EXPECT_TRUE(in);
    return bytes;
  }
  void put_file(const std::vector<std::byte>& bytes) const {
    std::fstream out(file(), std::ios::binary | std::ios::in | std::ios::out);
    out.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  }
  bool lies_there(uint64_t number, size_t size) const {
    const auto bytes = raw_file();
    const auto plain = content_of(number, size);
    return ::memmem(bytes.data(), bytes.size(), plain.data(), std::min<size_t>(size, 32)) != nullptr;
  }

  struct Record {
    uint64_t offset = 0, segment = 0;
    RecordHeader header;
  };
  // Every block's record in the file, by its number.
  std::map<uint64_t, Record> records(const std::vector<std::byte>& bytes, uint64_t blocks) {
    const auto layout = Superblock::decode(ConstPage(bytes.data(), kPageBytes));
    EXPECT_TRUE(layout);
    uuid_ = layout->uuid;
    segment_bytes_ = layout->segment_bytes;
    std::map<Key, uint64_t> names;
    for (uint64_t i = 0; i < blocks; ++i) names[key_of(i)] = i;
    std::map<uint64_t, Record> found;
    for (uint64_t segment = kDataOffset; segment + segment_bytes_ <= bytes.size();
         segment += segment_bytes_) {
      const auto head = SegmentHeader::decode(uuid_, ConstPage(bytes.data() + segment, kPageBytes));
      if (!head) continue;
      for (uint64_t at = segment; at + kRecordHeaderBytes <= segment + segment_bytes_; at += kUnitBytes) {
        const auto header = RecordHeader::decode(
            uuid_, head->sequence,
            std::span<const std::byte, kRecordHeaderBytes>(bytes.data() + at, kRecordHeaderBytes));
        if (header && names.contains(header->key)) found[names[header->key]] = {at, segment, *header};
      }
    }
    return found;
  }
  // As an attacker does, who can compute a CRC.
  static void right_crc(std::byte* header) {
    const uint32_t crc = crc32c({header, kRecordHeaderBytes - 4});
    std::memcpy(header + kRecordHeaderBytes - 4, &crc, sizeof crc);
  }
  // The start reads the headers of records then.
  void destroy_footers(std::vector<std::byte>& bytes) const {
    for (uint64_t segment = kDataOffset; segment + segment_bytes_ <= bytes.size(); segment += segment_bytes_)
      std::memset(bytes.data() + segment + segment_bytes_ - kPageBytes, 0, kPageBytes);
  }

  std::shared_ptr<Keyring> keys_ = std::make_shared<Keyring>();
  Uuid uuid_{};
  uint64_t segment_bytes_ = 0;
};

TEST_F(EncryptionTest, BlocksComeBackAndTheDiskDoesNotHaveThem) {
  start();
  const size_t sizes[] = {1, 63, 64, 3968, 65'536, 100'001, 131'200, 400'000};
  for (size_t i = 0; i < std::size(sizes); ++i) memory_->offer(i, sizes[i]);
  ASSERT_TRUE(memory_->wait_written(std::size(sizes)));
  for (int starts = 0; starts < 2; ++starts) {
    for (size_t i = 0; i < std::size(sizes); ++i) EXPECT_TRUE(read(i, sizes[i])) << sizes[i];
    if (starts == 0) {
      EXPECT_EQ(device_->stats().encrypted, std::size(sizes));
      EXPECT_EQ(device_->stats().encrypted_bytes, device_->stats().block_bytes);
    }
    start();
  }
  device_->close();
  for (size_t i = 1; i < std::size(sizes); ++i) EXPECT_FALSE(lies_there(i, sizes[i])) << sizes[i];
  const auto found = records(raw_file(), std::size(sizes));
  ASSERT_EQ(found.size(), std::size(sizes));
  std::set<Nonce> nonces;
  for (const auto& [number, record] : found) {
    EXPECT_TRUE(record.header.encrypted());
    EXPECT_NE(record.header.crc32c, crc32c(content_of(number, sizes[number])))
        << "it would tell what lies there";
    nonces.insert(record.header.nonce);
  }
  EXPECT_EQ(nonces.size(), std::size(sizes));
}

// The records of other tenants are as they always were.
TEST_F(EncryptionTest, WithoutAKeyRecordsAreAsBefore) {
  start(std::make_shared<Keyring>());
  write_blocks(0, 3);
  device_->close();
  EXPECT_TRUE(lies_there(1, kBytes)) << "so this search finds what is there";
  const auto record = records(raw_file(), 3)[1];
  EXPECT_EQ(record.header.flags, 0u);
  EXPECT_EQ(record.header.crc32c, crc32c(content_of(1, kBytes)));
}

TEST_F(EncryptionTest, AStartWithoutKeysFindsTheBlocksWhenTheyCome) {
  start();
  write_blocks(0, 20);
  start(std::make_shared<Keyring>());
  EXPECT_EQ(device_->stats().recovered, 20u) << "the index needs no key";
  EXPECT_FALSE(device_->find(kTenant, key_of(3))) << "so that it can be put again";
  EXPECT_FALSE(read(3, kBytes));
  EXPECT_EQ(device_->prefetch(kTenant, key_of(3), 1 << 20, ~uint64_t{0}), 0u);
  EXPECT_EQ(device_->pin(kTenant, key_of(3), 1, 0), Code::kNotFound);
  ASSERT_TRUE(keys_->set(kTenant, {raw_key(1)}));
  for (uint64_t i = 0; i < 20; ++i) EXPECT_TRUE(read(i, kBytes)) << i;
  EXPECT_EQ(device_->stats().corrupt, 0u);
}

TEST_F(EncryptionTest, AnotherKeyIsAMissAndTheBlockCanBePutAgain) {
  start();
  write_blocks(0, 3);
  start(std::make_shared<Keyring>());
  ASSERT_TRUE(keys_->set(kTenant, {raw_key(2)}));
  EXPECT_FALSE(read(1, kBytes));
  EXPECT_TRUE(memory_->wait_event("disk_key_missing"));
  EXPECT_EQ(device_->stats().key_misses, 1u);
  EXPECT_EQ(device_->stats().corrupt, 0u) << "the disk is sound";
  EXPECT_FALSE(device_->find(kTenant, key_of(1)));
  write_blocks(1, 2);
  EXPECT_TRUE(read(1, kBytes));
  // With both keys all of it is there.
  start(std::make_shared<Keyring>());
  ASSERT_TRUE(keys_->set(kTenant, {raw_key(2), raw_key(1)}));
  for (uint64_t i = 0; i < 3; ++i) EXPECT_TRUE(read(i, kBytes)) << i;
}

TEST_F(EncryptionTest, ARotatedKeyReadsUntilItGoes) {
  start();
  write_blocks(0, 5);
  ASSERT_TRUE(keys_->set(kTenant, {raw_key(2), raw_key(1)}));
  write_blocks(5, 10);
  for (uint64_t i = 0; i < 10; ++i) EXPECT_TRUE(read(i, kBytes)) << i;
  ASSERT_TRUE(keys_->set(kTenant, {raw_key(2)}));
  for (uint64_t i = 0; i < 10; ++i) EXPECT_EQ(read(i, kBytes), i >= 5) << i;
  EXPECT_EQ(device_->stats().key_misses, 5u);
  device_->close();
  auto found = records(raw_file(), 10);
  EXPECT_EQ(found[4].header.key_id, TenantKey::id_of(raw_key(1)));
  EXPECT_EQ(found[5].header.key_id, TenantKey::id_of(raw_key(2)));
}

// One bit of every byte of the header, with a CRC that is right, and bits of the payload.
TEST_F(EncryptionTest, NoFlippedBitIsServed) {
  start();
  constexpr uint64_t kHeaderBits = (kRecordHeaderBytes - 4) * 8, kPayloadBits = 200;
  constexpr size_t kSmall = 200;
  write_blocks(0, kHeaderBits + kPayloadBits + 1, kSmall);
  device_->close();
  auto bytes = raw_file();
  auto found = records(bytes, kHeaderBits + kPayloadBits + 1);
  ASSERT_EQ(found.size(), kHeaderBits + kPayloadBits + 1);
  for (uint64_t i = 0; i < kHeaderBits + kPayloadBits; ++i) {
    std::byte* const record = bytes.data() + found[i].offset;
    const uint64_t bit = i < kHeaderBits ? i : kRecordHeaderBytes * 8 + (i - kHeaderBits) * 8 + i % 8;
    record[bit / 8] ^= std::byte{1} << (bit % 8);
    right_crc(record);
  }
  put_file(bytes);
  start();
  for (uint64_t i = 0; i < kHeaderBits + kPayloadBits; ++i) EXPECT_FALSE(read(i, kSmall)) << i;
  EXPECT_TRUE(read(kHeaderBits + kPayloadBits, kSmall)) << "what is as it was";
  const auto stats = device_->stats();
  EXPECT_EQ(stats.corrupt + stats.key_misses, kHeaderBits + kPayloadBits);
  EXPECT_EQ(stats.key_misses, 32u) << "the bits of the key's name";
  EXPECT_GE(stats.decrypt_failures, kPayloadBits + (24 + 16 + 4) * 8) << "nonce, tag, the encrypted CRC";
  EXPECT_EQ(memory_->open_reservations(), 0u);
}

// A record that is sound, under the name of another block or of another tenant, or from another time.
TEST_F(EncryptionTest, NoRecordCountsInAnotherPlace) {
  constexpr TenantId kOther = kTenant + 7;
  start();
  write_blocks(0, 4);
  device_->close();
  auto bytes = raw_file();
  auto found = records(bytes, 4);
  // The record of block 0 as block 1; block 2 as the other tenant's.
  const auto whole = record_bytes(kBytes);
  RecordHeader renamed = found[0].header;
  renamed.key = key_of(1);
  std::memcpy(bytes.data() + found[1].offset, bytes.data() + found[0].offset, whole);
  renamed.encode(
      uuid_, std::span<std::byte, kRecordHeaderBytes>(bytes.data() + found[1].offset, kRecordHeaderBytes));
  RecordHeader taken = found[2].header;
  taken.tenant = kOther;
  taken.encode(uuid_,
               std::span<std::byte, kRecordHeaderBytes>(bytes.data() + found[2].offset, kRecordHeaderBytes));
  destroy_footers(bytes);
  put_file(bytes);
  ASSERT_TRUE(keys_->set(kOther, {raw_key(1)}));  // a careless operator: the same key twice
  start();
  EXPECT_TRUE(device_->find(kTenant, key_of(1)));
  EXPECT_TRUE(device_->find(kOther, key_of(2))) << "the index believes what it reads";
  EXPECT_FALSE(read(1, kBytes));
  auto done = std::make_shared<std::promise<void>>();
  ASSERT_TRUE(device_->fetch(kOther, key_of(2), [done] { done->set_value(); }));
  ASSERT_EQ(done->get_future().wait_for(std::chrono::seconds(20)), std::future_status::ready);
  EXPECT_TRUE(memory_->taken_up(2).empty());
  EXPECT_EQ(device_->stats().decrypt_failures, 2u);
  EXPECT_EQ(device_->stats().corrupt, 2u);
  EXPECT_TRUE(read(0, kBytes));
  EXPECT_TRUE(read(3, kBytes));
}

// A kind of record that a later version may write.
TEST_F(EncryptionTest, AForeignFlagIsAMiss) {
  start();
  write_blocks(0, 6);
  device_->close();
  auto bytes = raw_file();
  auto found = records(bytes, 6);
  RecordHeader foreign = found[2].header;
  foreign.flags |= 4;
  foreign.encode(
      uuid_, std::span<std::byte, kRecordHeaderBytes>(bytes.data() + found[2].offset, kRecordHeaderBytes));
  put_file(bytes);
  start();
  EXPECT_FALSE(read(2, kBytes));
  EXPECT_EQ(device_->stats().corrupt, 1u) << "its footer says otherwise";
  device_->close();
  destroy_footers(bytes);
  put_file(bytes);
  start();
  EXPECT_EQ(device_->stats().recovered, 5u) << "and what lies behind it is found";
  for (uint64_t i = 0; i < 6; ++i) EXPECT_EQ(read(i, kBytes), i != 2) << i;
}

TEST_F(EncryptionTest, WithoutLibcryptoNothingIsWritten) {
  start(std::make_shared<Keyring>(
      [] { return Result<const Libcrypto*>(Code::kConfigInvalid, "libcrypto was not found"); }));
  EXPECT_EQ(keys_->set(kTenant, {raw_key(1)}).code, Code::kConfigInvalid);
  for (uint64_t i = 0; i < 5; ++i) memory_->offer(i, kBytes);
  ASSERT_TRUE(memory_->wait_for([] { return true; }));
  for (int tries = 0; tries < 4000 && memory_->ends(Demotion::kRefused) < 5; ++tries)
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  EXPECT_EQ(memory_->ends(Demotion::kRefused), 5u);
  EXPECT_EQ(device_->stats().key_refused, 5u);
  EXPECT_EQ(device_->stats().blocks, 0u);
  device_->close();
  for (uint64_t i = 0; i < 5; ++i) EXPECT_FALSE(lies_there(i, kBytes));
}

TEST_F(EncryptionTest, ATenantThatHasToBeEncryptedIsNeverWrittenAsItIs) {
  const auto keys = std::make_shared<Keyring>();
  EXPECT_FALSE(keys->writing(kTenant).refused);
  keys->require(kTenant, true);
  EXPECT_TRUE(keys->writing(kTenant).refused);
  ASSERT_TRUE(keys->set(kTenant, {raw_key(1), raw_key(2)}));
  EXPECT_EQ(keys->writing(kTenant).key->id(), TenantKey::id_of(raw_key(1)));
  keys->require(kTenant, false);
  ASSERT_TRUE(keys->set(kTenant, {}));
  EXPECT_TRUE(keys->writing(kTenant).refused) << "it had a key";
  EXPECT_FALSE(keys->has_key(kTenant));
  EXPECT_EQ(keys->find(kTenant, TenantKey::id_of(raw_key(1))), nullptr);
  EXPECT_FALSE(keys->writing(kTenant + 1).refused);
}

// What moves to a newer segment is encrypted anew, and with the key of now.
TEST_F(EncryptionTest, ABlockThatMovesTakesTheNewKey) {
  start();
  constexpr size_t kLarge = 100'000;
  write_blocks(0, 2, kLarge);
  ASSERT_EQ(device_->pin(kTenant, key_of(0), ~uint64_t{0}, 0), Code::kOk);
  ASSERT_TRUE(keys_->set(kTenant, {raw_key(2), raw_key(1)}));
  for (uint64_t from = 2; from < 150; from += 10) write_blocks(from, from + 10, kLarge);
  ASSERT_GT(device_->stats().kept, 0u);
  ASSERT_TRUE(keys_->set(kTenant, {raw_key(2)}));
  EXPECT_TRUE(read(0, kLarge));
  EXPECT_FALSE(device_->find(kTenant, key_of(1)));
  EXPECT_EQ(device_->stats().corrupt, 0u);
}

TEST_F(EncryptionTest, AnotherNodeReadsASharedLogWithTheKey) {
  DeviceOptions with = options();
  with.path = log_of("node-1");
  with.keyring = keys_;
  ASSERT_TRUE(open(with));
  write_blocks(0, 10, kSize);
  const auto theirs = std::make_shared<Keyring>();
  SharedOptions reading;
  reading.folder = open_shared_folder(folder_.string());
  reading.own_name = "node-2.mooncache";
  reading.scan_ms = 10;
  reading.stall_ms = 60'000;
  reading.threads = 2;
  reading.keyring = theirs;
  reader_ = std::make_unique<SharedReader>(reading, above_);
  ASSERT_TRUE(wait([&] { return reader_->stats().blocks == 10; }));
  EXPECT_FALSE(knows(1));
  EXPECT_FALSE(get(1));
  ASSERT_TRUE(theirs->set(kTenant, {raw_key(9)}));
  EXPECT_TRUE(knows(1));
  EXPECT_FALSE(get(1));
  EXPECT_EQ(reader_->stats().key_misses, 1u);
  EXPECT_FALSE(knows(1));
  ASSERT_TRUE(theirs->set(kTenant, {raw_key(1)}));
  for (uint64_t i = 2; i < 10; ++i) EXPECT_TRUE(get(i)) << i;
  EXPECT_EQ(reader_->stats().corrupt, 0u);
  EXPECT_EQ(reader_->stats().decrypt_failures, 0u);
}

}  // namespace
}  // namespace mooncache::test
