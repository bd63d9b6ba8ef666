"""Rows, tables and output that commands, benchmarks and the simulator share."""
