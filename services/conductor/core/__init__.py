"""What the conductor knows and decides: no I/O, time and randomness are handed in."""
