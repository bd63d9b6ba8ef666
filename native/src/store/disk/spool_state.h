// Behind open_spool_queue(): the queue of the device's thread, and the thread that puts segments into the
// store.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "store/disk/object_log.h"
#include "store/disk/spool_queue.h"

namespace mooncache::store::disk {

uint64_t spool_now_ms();
bool read_spool(int fd, uint64_t offset, std::span<std::byte> to);
bool write_spool(int fd, uint64_t offset, std::span<const std::byte> from);
// Gives the room of these bytes back; they are zeros from then on.
void punch_spool(int fd, uint64_t offset, uint64_t bytes);

class SpoolQueue final : public IoQueue {
 public:
  SpoolQueue(int fd, std::unique_ptr<IoQueue> file_queue, SpoolOptions options);
  ~SpoolQueue() override;

  bool submit(const Io& io) override;
  void begin() override { file_queue_->begin(); }
  void wait(std::vector<IoEnd>& ends, int timeout_ms) override;
  void wake() override { file_queue_->wake(); }
  std::string description() const override { return file_queue_->description() + " and an object store"; }
  Status laid_out(const Superblock& layout) override;
  bool takes_blocks() const override;
  bool overwrite_elsewhere(uint64_t offset, uint64_t size, std::span<const std::byte> head) override;
  bool sync_overwritten() override;
  void finish() override;
  void released(uint64_t offset) override;

 private:
  using Lock = std::unique_lock<std::mutex>;
  struct Range {
    uint64_t begin = 0, end = 0;  // in the segment
    std::vector<std::byte> head;  // of what stands there then; the rest is zeros
  };
  struct Segment {
    uint64_t sequence = 0;          // of the writing in the file; 0: not in use
    uint64_t used = 0, footer = 0;  // written without a gap: from the begin; and at the end
    bool sealed = false;
    bool sent = false;                    // sealed, and the store has all of it: its records are read there
    bool punched = false;                 // they are no longer in the file
    uint64_t changed_ms = 0;              // since when something of it is not in the store; 0: nothing
    std::optional<SegmentObject> object;  // the latest in the store
    bool wiping = false;                  // the store has to hear that it is given up
    uint64_t given_up = 0;                // the sequence of what the store has heard so of
    bool deleting = false;                // all its objects are to go
    bool busy = false;                    // one changes its objects: the uploader, or a purge
    std::map<uint64_t, uint64_t> ahead;   // writes that ended behind a gap, begin to end
    std::vector<Range> purged;            // to be overwritten in the object
    uint32_t file_ios = 0;                // under way in the file
  };
  struct Former {
    SegmentObject object;
    uint64_t due_ms = 0;  // who listed it may still read it until then
  };
  // Of the file's queue.
  struct FileIo {
    uint32_t number = kNoNumber;
    uint64_t begin = 0, end = 0;
    bool write = false;
  };
  // Of the store.
  struct RemoteRead {
    Io io;
    SegmentObject object;
    uint64_t begin = 0;  // in the segment
    uint64_t until_ms = 0, not_before_ms = 0;
    bool asked = false;
  };
  struct Written {
    uint32_t number = 0;
    uint64_t sequence = 0, used = 0;
  };
  struct Held {
    Io io;
    uint64_t until_ms = 0;
    std::vector<Written> written;  // a sync: what was not in the store
  };
  // What comes from serving threads, which may come when the queue is gone.
  struct Arrivals {
    std::mutex mutex;
    IoQueue* wakes = nullptr;
    std::vector<std::pair<std::vector<uint64_t>, ObjectAnswer>> answers;  // ids of remote reads
  };
  static constexpr uint32_t kNoNumber = ~0u;

  // spool_queue.cpp: the device's thread
  bool submit_file(const Io& io, uint32_t number);
  bool begin_segment(const Io& io, uint32_t number);
  void file_ended(const IoEnd& end);
  void ask_store();
  void ask(const std::vector<uint64_t>& ids);
  void take_answers(std::vector<IoEnd>& ends);
  void answered(const std::vector<uint64_t>& ids, const ObjectAnswer& answer, std::vector<IoEnd>& ends);
  void take_held(std::vector<IoEnd>& ends);
  bool is_sent(const Written& written) const;
  void punch();
  uint64_t offset_of(uint32_t number) const { return kDataOffset + number * segment_bytes_; }

  // spool_start.cpp: the device's thread
  void adopt(uint32_t number, const ObjectListing& listing);

  // spool_upload.cpp: a thread of its own, and those who purge
  struct Work {
    enum class Kind : uint8_t { kNone, kSuperblock, kGiveUp, kDelete, kPut, kFormer } kind = Kind::kNone;
    uint32_t number = 0;
  };
  void upload_for_ever();
  Work next_work(uint64_t now_ms) const;
  bool carry_out(Lock& lock, const Work& work);
  bool put_superblock(Lock& lock);
  bool put_segment(Lock& lock, uint32_t number);
  bool give_up_segment(Lock& lock, uint32_t number);
  bool delete_segment(Lock& lock, uint32_t number);
  bool has_objects(uint32_t number) const;
  bool delete_former(Lock& lock);
  bool overwrite_object(Lock& lock, uint32_t number);
  int64_t write_object(Lock& lock, std::string name, std::vector<std::byte> bytes);
  int64_t delete_object(Lock& lock, std::string name);

  const int fd_;
  const SpoolOptions options_;
  const std::unique_ptr<IoQueue> file_queue_;
  const std::shared_ptr<Arrivals> arrivals_ = std::make_shared<Arrivals>();

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  Uuid uuid_{};
  uint64_t segment_bytes_ = 0;  // 0: not laid out yet
  std::vector<Segment> segments_;
  std::deque<Former> former_;
  bool superblock_changed_ = false;
  bool urgent_ = false;  // a sync waits for what is not sealed
  bool finishing_ = false, store_fails_ = false;
  bool punches_ = false;  // there is room to be given back

  // The device's thread's own.
  std::map<uint64_t, FileIo> file_ios_;  // by cookie
  std::map<uint64_t, RemoteRead> remote_;
  std::deque<Held> wipes_, syncs_;
  std::vector<IoEnd> file_ends_;
  uint64_t next_id_ = 1;
  bool reads_fail_ = false;  // one read at a time asks whether the store answers again

  std::atomic<bool> stop_{false};
  std::thread uploader_;
};

}  // namespace mooncache::store::disk
