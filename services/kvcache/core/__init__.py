"""Decisions about an engine's blocks: pure code, no threads, no clock."""
