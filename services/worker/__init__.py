"""The worker: the supervisor beside one engine. It starts it, watches it, and tells the conductor about it."""
