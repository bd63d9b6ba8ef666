"""Benchmarks: `mooncache bench …`. Speed lives here, as ratios within one run, and never in a test."""
