"""Codes, proofs and what becomes of an invitation: pure functions of values, times and random bytes."""
