"""What every process is made of: open ports, authenticated calls, running duties, logs, metrics and traces."""
