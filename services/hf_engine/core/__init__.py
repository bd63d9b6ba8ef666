"""Decisions of the engine: pure code, no torch, no threads, no clock."""
