"""Benchmark of the conductor: how long a decision takes."""
