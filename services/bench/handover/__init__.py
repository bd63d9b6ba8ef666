"""What one request gets from prefill, transfer and decode in different engines; one file per case."""
