"""Control calls of the store node, one file each. Only the cluster token is let in (see `service.py`)."""
