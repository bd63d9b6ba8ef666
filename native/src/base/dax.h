// DAX devices (CXL or persistent memory as /dev/dax*) as the kernel describes them.
#pragma once

#include <sys/stat.h>

#include <cstdint>
#include <string>

namespace mooncache::dax {

// The folder that describes a character device; `sysfs` is /sys.
std::string about(const std::string& sysfs, dev_t device);
// Of stat(2), so that a device need not be opened, which can do something.
bool is_device(const std::string& sysfs, const struct stat& facts);
// A page of its mappings, which one fault loses: 2 MiB where the kernel does not tell, a page of the
// processor at least.
uint64_t page_bytes(const std::string& sysfs, dev_t device);
// A number that the kernel tells in a file; 0 when it does not.
uint64_t number_in(const std::string& path);

}  // namespace mooncache::dax
