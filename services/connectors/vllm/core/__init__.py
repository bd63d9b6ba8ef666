"""What the connector decides: plain functions and classes, with time passed in and without vLLM."""
