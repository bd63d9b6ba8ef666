"""The simulator: real policies over traces, on clusters that need not exist."""
