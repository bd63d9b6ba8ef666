"""Programs that run inside the test machine."""
