// A fake /sys of a machine with two sockets. Socket 0: fake0 and GPU 0000:3d:00.0 below one switch,
// fake1 and its own port; socket 1: fake2, fake3 and GPU 0000:83:00.0, each with a port of its own.
#pragma once

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

namespace mooncache::testing {

class TwoSockets {
 public:
  TwoSockets() : folder_(std::filesystem::temp_directory_path() / ("sockets-" + std::to_string(getpid()))) {
    std::filesystem::remove_all(folder_);
    device("pci0000:3a/0000:3a:00.0/0000:3b:00.0/0000:3b:04.0/0000:3c:00.0", 0, "fake0");
    device("pci0000:3a/0000:3a:00.0/0000:3b:00.0/0000:3b:08.0/0000:3d:00.0", 0);
    device("pci0000:3a/0000:3a:02.0/0000:50:00.0", 0, "fake1");
    device("pci0000:80/0000:80:01.0/0000:81:00.0", 1, "fake2");
    device("pci0000:80/0000:80:02.0/0000:82:00.0", 1, "fake3");
    device("pci0000:80/0000:80:03.0/0000:83:00.0", 1);
    for (const char* node : {"node0", "node1"})
      std::filesystem::create_directories(folder_ / "devices/system/node" / node);
  }
  ~TwoSockets() { std::filesystem::remove_all(folder_); }
  TwoSockets(const TwoSockets&) = delete;
  TwoSockets& operator=(const TwoSockets&) = delete;
  std::string folder() const { return folder_.string(); }

 private:
  void device(const std::string& path, int node, const std::string& rdma = "") {
    namespace fs = std::filesystem;
    const fs::path real = folder_ / "devices" / path;
    fs::create_directories(real);
    std::ofstream(real / "numa_node") << node << "\n";
    fs::create_directories(folder_ / "bus/pci/devices");
    fs::create_directory_symlink(real, folder_ / "bus/pci/devices" / real.filename());
    if (rdma.empty()) return;
    fs::create_directories(folder_ / "class/infiniband" / rdma);
    fs::create_directory_symlink(real, folder_ / "class/infiniband" / rdma / "device");
  }
  const std::filesystem::path folder_;
};

}  // namespace mooncache::testing
