"""I/O of the conductor: the pool, metrics."""
