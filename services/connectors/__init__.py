"""Connectors: how engines that are not ours use the pool."""
