"""The embedded cluster: a master and store nodes as real child processes of this machine."""
