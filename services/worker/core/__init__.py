"""Pure decisions of the worker: no I/O, no clock, no randomness of their own."""
