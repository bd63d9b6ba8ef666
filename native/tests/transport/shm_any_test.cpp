// Whatever descriptors a node passes, and whatever it says of them: they are mapped or refused, no access
// leaves what was mapped, and memory that goes away is an error of the transfer, never the process's end.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <random>

#include "transport/shm.h"

namespace mooncache {
namespace {

constexpr int kRounds = 2000;
constexpr uint64_t kPage = 4096;
constexpr std::array<uint64_t, 8> kEdges = {0, 1, 7, kPage - 1, kPage, kPage + 1, 1ull << 63, UINT64_MAX};

// Draws with the seed that a failure prints.
class Draw {
 public:
  explicit Draw(uint64_t seed) : random_(seed) {}
  uint64_t below(uint64_t bound) { return random_() % bound; }
  bool one_in(uint64_t n) { return below(n) == 0; }
  uint64_t edge() { return one_in(2) ? kEdges[below(kEdges.size())] : below(4 * kPage); }

 private:
  std::mt19937_64 random_;
};

struct Passed {
  net::UniqueFd fd;
  uint64_t bytes = 0;    // that lie behind it
  bool shrinks = false;  // it can be truncated later
  bool writable = false;
};

net::UniqueFd memory(uint64_t bytes) {
  net::UniqueFd fd(memfd_create("any", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  EXPECT_EQ(ftruncate(fd.get(), static_cast<off_t>(bytes)), 0);
  return fd;
}

Passed passed(Draw& draw) {
  Passed made;
  switch (draw.below(10)) {
    case 0:
      made.fd = net::UniqueFd(open("/dev/null", O_RDWR | O_CLOEXEC));
      break;
    case 1:
      made.fd = net::UniqueFd(open("/", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
      break;
    case 2:
      made.fd = net::UniqueFd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
      break;
    case 3:  // none: more were promised than came
      break;
    case 4: {  // memory that may only be read
      made.bytes = kPage * (1 + draw.below(4));
      const net::UniqueFd whole = memory(made.bytes);
      made.fd =
          net::UniqueFd(open(("/proc/self/fd/" + std::to_string(whole.get())).c_str(), O_RDONLY | O_CLOEXEC));
      break;
    }
    default:
      made.bytes =
          draw.one_in(8) ? draw.below(3) : kPage * draw.below(5) + (draw.one_in(3) ? draw.below(kPage) : 0);
      made.fd = memory(made.bytes);
      made.writable = true;
      if (draw.one_in(2)) {
        EXPECT_EQ(fcntl(made.fd.get(), F_ADD_SEALS, F_SEAL_SHRINK), 0);
      } else {
        made.shrinks = true;
      }
  }
  return made;
}

wire::SegmentInfo said(Draw& draw, const Passed& made) {
  wire::SegmentInfo info;
  info.segment = static_cast<uint32_t>(draw.one_in(8) ? UINT32_MAX : draw.below(4));
  info.kind = static_cast<uint32_t>(draw.one_in(16) ? 2 + draw.below(3) : draw.below(2));
  info.size = draw.one_in(5) ? draw.edge() : made.bytes;
  return info;
}

// Each address that the segments give out for a range must lie in memory that can be touched.
void touch(ShmSegments& segments, Draw& draw, bool lost) {
  for (int i = 0; i < 8; ++i) {
    const auto id = static_cast<uint32_t>(draw.below(5));
    const uint64_t offset = draw.edge(), size = draw.edge();
    const uint64_t end = offset + size;
    if (const std::byte* found = segments.readable(id, offset, size); found != nullptr && size > 0) {
      ASSERT_GE(end, offset);
      ASSERT_LE(end, 5 * kPage) << "no arena is as large";
      const volatile std::byte first = found[0], last = found[size - 1];
      (void)first;
      (void)last;
    }
    if (std::byte* found = segments.writable(id, offset, size); found != nullptr && size > 0) {
      ASSERT_TRUE(segments.can_write());
      ASSERT_LE(end, 5 * kPage);
      found[0] = found[size - 1] = std::byte{1};
    }
    (void)segments.generation(static_cast<uint32_t>(draw.edge()));
  }
  ASSERT_TRUE(lost || !segments.damaged()) << "nothing was taken away";
}

void round(uint64_t seed, int& mapped_count) {
  SCOPED_TRACE("seed " + std::to_string(seed));
  Draw draw(seed);
  std::vector<wire::SegmentInfo> infos;
  std::vector<net::UniqueFd> fds, twins;
  std::vector<Passed> made;
  const size_t segments = draw.one_in(50) ? 201 : draw.below(4);
  for (size_t i = 0; i < segments; ++i) {
    made.push_back(passed(draw));
    infos.push_back(said(draw, made.back()));
  }
  const bool writable = draw.one_in(2);
  const auto pass = [&](const Passed& one) {
    fds.emplace_back(one.fd.valid() ? fcntl(one.fd.get(), F_DUPFD_CLOEXEC, 0) : -1);
  };
  for (const Passed& one : made) pass(one);
  for (size_t i = 0; writable && i < made.size(); ++i) {
    if (infos[i].kind != wire::SegmentInfo::kArena) continue;
    if (draw.one_in(8)) {
      pass(passed(draw));
    } else {
      pass(made[i]);
    }
  }
  if (draw.one_in(10) && !fds.empty()) fds.pop_back();
  if (draw.one_in(10)) pass(passed(draw));

  auto mapped = ShmSegments::map(infos, std::move(fds));
  if (!mapped) {
    ASSERT_EQ(mapped.status().code, Code::kTransportUnavailable);
    ASSERT_FALSE(mapped.status().message.empty());
    return;
  }
  ++mapped_count;
  bool promised = true;  // no more than there is
  for (size_t i = 0; i < made.size(); ++i) promised &= infos[i].size != 0 && infos[i].size <= made[i].bytes;
  ASSERT_TRUE(promised) << "a segment shorter than said was mapped";
  touch(**mapped, draw, false);
  bool lost = false;
  for (const Passed& one : made) {
    if (!one.shrinks || draw.one_in(2)) continue;
    ASSERT_EQ(ftruncate(one.fd.get(), 0), 0);
    lost = true;
  }
  touch(**mapped, draw, lost);
}

TEST(ShmAnyTest, AnyDescriptorsAreMappedOrRefused) {
  int mapped = 0;
  for (int seed = 1; seed <= kRounds; ++seed) {
    round(static_cast<uint64_t>(seed), mapped);
    if (HasFatalFailure()) return;
  }
  EXPECT_GT(mapped, kRounds / 50) << "too few get past the first check";
  EXPECT_LT(mapped, kRounds / 2);
}

}  // namespace
}  // namespace mooncache
