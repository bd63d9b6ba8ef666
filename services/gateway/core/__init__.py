"""Decisions of the gateway: no clock, no socket, no randomness of their own."""
