"""Periodic duties of the store node, one file each; `runner.py` lists them."""
