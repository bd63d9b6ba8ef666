"""One file for each RPC of the conductor."""
