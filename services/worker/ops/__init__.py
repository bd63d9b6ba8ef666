"""Control calls of the worker, one file each. Only the cluster token is let in (see `service.py`)."""
