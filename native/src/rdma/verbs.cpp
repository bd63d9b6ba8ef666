#include "rdma/verbs.h"

#include <dlfcn.h>

#include <cstring>
#include <map>
#include <memory>
#include <mutex>

namespace mooncache::rdma {

namespace {

struct LoadedVerbs {
  Verbs table{};
  std::string why;  // empty: the table is whole
};

template <typename Function>
void bind(void* library, const char* name, Function& slot, std::string& why) {
  void* symbol = dlsym(library, name);
  if (symbol == nullptr && why.empty()) {
    why = std::string("this libibverbs lacks ") + name + " (rdma-core 32 or newer is needed)";
  }
  slot = reinterpret_cast<Function>(symbol);
}

LoadedVerbs load(const std::string& path) {
  LoadedVerbs loaded;
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    loaded.why = path + " cannot be opened (Debian package libibverbs1): " + dlerror();
    return loaded;
  }
  Verbs& t = loaded.table;
  std::string& why = loaded.why;
#define MOONCACHE_BIND(name) bind(library, "ibv_" #name, t.name, why)
  MOONCACHE_BIND(get_device_list);
  MOONCACHE_BIND(free_device_list);
  MOONCACHE_BIND(get_device_name);
  MOONCACHE_BIND(open_device);
  MOONCACHE_BIND(close_device);
  MOONCACHE_BIND(query_device);
  MOONCACHE_BIND(query_port);
  MOONCACHE_BIND(get_async_event);
  MOONCACHE_BIND(ack_async_event);
  MOONCACHE_BIND(alloc_pd);
  MOONCACHE_BIND(dealloc_pd);
  MOONCACHE_BIND(reg_mr_iova);
  MOONCACHE_BIND(dereg_mr);
  MOONCACHE_BIND(create_comp_channel);
  MOONCACHE_BIND(destroy_comp_channel);
  MOONCACHE_BIND(create_cq);
  MOONCACHE_BIND(destroy_cq);
  MOONCACHE_BIND(get_cq_event);
  MOONCACHE_BIND(ack_cq_events);
  MOONCACHE_BIND(create_qp);
  MOONCACHE_BIND(modify_qp);
  MOONCACHE_BIND(destroy_qp);
#undef MOONCACHE_BIND
  bind(library, "_ibv_query_gid_ex", t.query_gid_ex, why);
  t.reg_dmabuf_mr = reinterpret_cast<decltype(t.reg_dmabuf_mr)>(dlsym(library, "ibv_reg_dmabuf_mr"));
  return loaded;
}

}  // namespace

Result<const Verbs*> load_verbs(const std::string& path) {
  static std::mutex mutex;
  static auto* known =
      new std::map<std::string, std::unique_ptr<LoadedVerbs>>();  // lives as long as the process
  const std::lock_guard lock(mutex);
  std::unique_ptr<LoadedVerbs>& loaded = (*known)[path];
  if (!loaded || !loaded->why.empty()) loaded = std::make_unique<LoadedVerbs>(load(path));
  if (!loaded->why.empty()) return unavailable(loaded->why);
  return &loaded->table;
}

Status unavailable(const std::string& what) {
  return {Code::kTransportUnavailable, "RDMA unavailable, because " + what};
}

Status refused(const std::string& call, int error) {
  return unavailable(call + " failed: " + std::strerror(error));
}

}  // namespace mooncache::rdma
