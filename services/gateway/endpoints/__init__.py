"""One file per path: what it answers. Everything around it is in shell/endpoint.py."""
