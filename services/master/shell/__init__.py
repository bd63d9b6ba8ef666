"""Where decisions meet the network."""
