"""What a person sees of simulated runs: tables, JSON, one HTML page, a log of decisions."""
