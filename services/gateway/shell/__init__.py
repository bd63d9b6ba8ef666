"""What the gateway does in the world: HTTP in and out, calls to the conductor, keys from a file."""
