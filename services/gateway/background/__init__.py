"""What the gateway does on its own, one file per duty."""
