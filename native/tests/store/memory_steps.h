// Every store to memory files, one after the other, as the processor makes it: what a process that is killed
// between two instructions leaves behind.
//
// While record() runs, the files' mappings are read-only. A store faults; the handler lets this one
// instruction through, with the processor's trap flag, and notes which words it changed. So the code that is
// recorded knows of nothing, and no store of it can be forgotten. The mappings are known because the linker
// leads mmap() and munmap() of the test program through here (--wrap). One thread stores at a time.
#pragma once

#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <ucontext.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

namespace mooncache::test {

// A word that became another one. An instruction may change several.
struct StoredWord {
  uint32_t instruction = 0;  // from 0
  uint32_t file = 0;
  uint64_t offset = 0;
  uint64_t value = 0;
};

class MemorySteps {
 public:
  explicit MemorySteps(std::span<const int> fds) {
    for (const int fd : fds) files_.push_back(identity(fd));
    all().push_back(this);
  }
  MemorySteps(const MemorySteps&) = delete;
  MemorySteps& operator=(const MemorySteps&) = delete;
  ~MemorySteps() { std::erase(all(), this); }

  // What `act` stores in the files, through mappings that exist or that it makes.
  template <typename Act>
  std::vector<StoredWord> record(const Act& act) {
    words_.clear();
    instructions_ = 0;
    for (Region& region : regions_) std::memcpy(region.last.data(), region.at, region.last.size());
    struct sigaction fault {
    }, step{};
    fault.sa_sigaction = on_fault;
    step.sa_sigaction = on_step;
    fault.sa_flags = step.sa_flags = SA_SIGINFO;
    ::sigaction(SIGSEGV, &fault, &former_fault_);
    ::sigaction(SIGTRAP, &step, &former_step_);
    recording = this;
    protect(PROT_READ);
    act();
    protect(PROT_READ | PROT_WRITE);
    recording = nullptr;
    ::sigaction(SIGSEGV, &former_fault_, nullptr);
    ::sigaction(SIGTRAP, &former_step_, nullptr);
    return words_;
  }

  static void mapped(void* at, size_t bytes, int protection, int fd) {
    if (fd < 0 || (protection & PROT_WRITE) == 0) return;
    for (MemorySteps* steps : all()) steps->add(static_cast<std::byte*>(at), bytes, fd);
  }
  static void unmapped(const void* at) {
    for (MemorySteps* steps : all())
      std::erase_if(steps->regions_, [&](const Region& r) { return r.at == at; });
  }

 private:
  struct Identity {
    dev_t device = 0;
    ino_t inode = 0;
    bool operator==(const Identity&) const = default;
  };
  struct Region {
    std::byte* at = nullptr;
    uint32_t file = 0;
    std::vector<std::byte> last;  // as the last store left it
  };
  // It outlives whoever maps memory until the end of the program.
  static std::vector<MemorySteps*>& all() {
    static auto* const one = new std::vector<MemorySteps*>;
    return *one;
  }
  static constexpr size_t kWord = sizeof(uint64_t);
  static constexpr size_t kReach = 128;  // more than one instruction changes, on either side of its fault
  static constexpr greg_t kTrapFlag = 0x100;

  static Identity identity(int fd) {
    struct stat facts {};
    return ::fstat(fd, &facts) == 0 ? Identity{facts.st_dev, facts.st_ino} : Identity{};
  }
  void add(std::byte* at, size_t bytes, int fd) {
    const auto found = std::find(files_.begin(), files_.end(), identity(fd));
    if (found == files_.end()) return;
    regions_.push_back({at, static_cast<uint32_t>(found - files_.begin()), {at, at + bytes}});
    if (recording == this) (void)::mprotect(at, bytes, PROT_READ);
  }
  void protect(int protection) const {
    for (const Region& region : regions_) (void)::mprotect(region.at, region.last.size(), protection);
  }
  static greg_t& flags(void* context) {
    return static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_EFL];
  }
  // Whoever faults elsewhere does it again, without this handler.
  static void on_fault(int, siginfo_t* info, void* context) {
    MemorySteps* const found = recording;
    if (found == nullptr) return;  // it ended just now, and its memory can be written again
    MemorySteps& steps = *found;
    steps.fault_ = static_cast<std::byte*>(info->si_addr);
    const auto has = [&](const Region& region) {
      return region.at <= steps.fault_ && steps.fault_ < region.at + region.last.size();
    };
    if (std::none_of(steps.regions_.begin(), steps.regions_.end(), has)) {
      ::sigaction(SIGSEGV, &steps.former_fault_, nullptr);
      return;
    }
    steps.protect(PROT_READ | PROT_WRITE);
    flags(context) |= kTrapFlag;
  }
  static void on_step(int, siginfo_t*, void* context) {
    flags(context) &= ~kTrapFlag;
    MemorySteps* const found = recording;
    if (found == nullptr) return;
    found->note();
    found->protect(PROT_READ);
  }
  void note() {
    const size_t before = words_.size();
    for (Region& region : regions_) {
      if (fault_ < region.at || fault_ >= region.at + region.last.size()) continue;
      const auto offset = static_cast<size_t>(fault_ - region.at) / kWord * kWord;
      const size_t end = std::min(region.last.size(), offset + kReach);
      for (size_t at = offset - std::min(offset, kReach); at < end; at += kWord) {
        if (std::memcmp(region.at + at, region.last.data() + at, kWord) == 0) continue;
        std::memcpy(region.last.data() + at, region.at + at, kWord);
        uint64_t value = 0;
        std::memcpy(&value, region.at + at, kWord);
        words_.push_back({instructions_, region.file, at, value});
      }
    }
    if (words_.size() > before) ++instructions_;
  }

  static inline MemorySteps* recording = nullptr;
  std::vector<Identity> files_;
  std::vector<Region> regions_;
  std::byte* fault_ = nullptr;
  uint32_t instructions_ = 0;
  std::vector<StoredWord> words_;
  struct sigaction former_fault_ {
  }, former_step_{};
};

}  // namespace mooncache::test
