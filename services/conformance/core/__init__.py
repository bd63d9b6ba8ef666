"""Verdicts, and bytes that follow from their keys."""
