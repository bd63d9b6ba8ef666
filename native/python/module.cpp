// mooncache._native: the one place where Python and the data plane meet. Each bind_<x>.cpp converts
// arguments, releases the GIL and calls the C++ library; no logic lives here.
#include "module.h"

#include <nanobind/nanobind.h>

NB_MODULE(_native, m) {
  m.doc() = "Mooncache native data plane";
  // A script that ends with a client in a global variable is not a leak worth pages of text on its terminal.
  nanobind::set_leak_warnings(false);
#ifdef MOONCACHE_BIND_HASH
  mooncache::python::bind_hash(m);
#endif
#ifdef MOONCACHE_BIND_INDEX
  mooncache::python::bind_index(m);
#endif
#ifdef MOONCACHE_BIND_REUSE
  mooncache::python::bind_reuse(m);
#endif
#ifdef MOONCACHE_BIND_STORE
  mooncache::python::bind_objects(m);
  mooncache::python::bind_store(m);
#endif
#ifdef MOONCACHE_BIND_CLIENT
  mooncache::python::bind_client(m);
#endif
#ifdef MOONCACHE_BIND_GPU
  mooncache::python::bind_gpu(m);
#endif
#ifdef MOONCACHE_BIND_TRANSFER
  mooncache::python::bind_transfer(m);
#endif
#ifdef MOONCACHE_BIND_PROBE
  mooncache::python::bind_probe(m);
#endif
}
