"""`mooncache bench replay`: a trace against a live cluster, and what the simulator says beside what was measured."""
