"""A throw-away virtual machine with real RDMA verbs, for tests on machines that have no RDMA device."""
