"""The store node: a thin service around the native data-plane server."""
