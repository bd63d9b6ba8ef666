"""For tests of the control plane, ours and those of people who build on it: a network in memory and virtual time."""
