"""What the commands work out, apart from asking and showing."""
