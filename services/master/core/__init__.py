"""Pure decisions of the master: time and randomness are passed in, effects come back as data."""
