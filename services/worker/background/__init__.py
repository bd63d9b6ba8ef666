"""What a worker does on its own, one file each."""
