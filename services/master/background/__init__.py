"""One file for each periodic duty."""
