#include "base/dax.h"

#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <vector>

namespace mooncache::dax {

namespace {

constexpr uint64_t kDefaultPageBytes = 2 << 20;

}  // namespace

std::string about(const std::string& sysfs, dev_t device) {
  return sysfs + "/dev/char/" + std::to_string(major(device)) + ":" + std::to_string(minor(device));
}

bool is_device(const std::string& sysfs, const struct stat& facts) {
  if (!S_ISCHR(facts.st_mode)) return false;
  std::vector<char> target(4096);
  const ssize_t length =
      ::readlink((about(sysfs, facts.st_rdev) + "/subsystem").c_str(), target.data(), target.size());
  const std::string subsystem(target.data(), static_cast<size_t>(std::max<ssize_t>(length, 0)));
  return subsystem.substr(subsystem.rfind('/') + 1) == "dax";
}

uint64_t page_bytes(const std::string& sysfs, dev_t device) {
  const std::string folder = about(sysfs, device);
  uint64_t align = number_in(folder + "/align");
  if (align == 0) align = number_in(folder + "/device/align");
  if (align == 0) align = kDefaultPageBytes;
  return std::max(align, static_cast<uint64_t>(::sysconf(_SC_PAGESIZE)));
}

uint64_t number_in(const std::string& path) {
  std::ifstream file(path);
  uint64_t number = 0;
  return file >> number ? number : 0;
}

}  // namespace mooncache::dax
