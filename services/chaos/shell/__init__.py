"""What touches the cluster: processes, requests, probes."""
