"""What the plug-ins decide: plain functions, without LMCache and without I/O."""
