"""Pure decisions of the store node: no I/O, no clock, no randomness of their own."""
