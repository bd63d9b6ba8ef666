"""Benchmarks of a whole cluster on this machine: later turns of a conversation, and a soak."""
