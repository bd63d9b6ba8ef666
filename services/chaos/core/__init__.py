"""Faults, their order and the verdict: pure functions over plain records."""
