"""Prices and what things cost by them, from values alone."""
