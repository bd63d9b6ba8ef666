"""Pure planning: no files, no clock, no randomness. Same input, same plan."""
