"""One file for each duty that the conductor has on its own."""
