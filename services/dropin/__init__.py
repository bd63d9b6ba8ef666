"""The Python API of Mooncake Store on top of our client, for programs that were written for it.

The distribution `mooncache-mooncake` (compat/mooncake) gives these classes the names that such programs import.
Keys are the caller's texts, results are the caller's numbers (0, a count, or a negative code), and no call raises for
what the pool says; placement, transports, checksums and tokens are those of `mooncache.Client`.
"""
