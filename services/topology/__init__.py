"""What moves bytes on this host: network devices with RDMA, GPUs, memory, and how far apart they are.

`sysfs.read` looks at the machine and returns plain values (`core.model.Host`); everything said about them, the
distances, what would be chosen and what to fix, is pure (`core`). Nothing here opens a device.
"""
