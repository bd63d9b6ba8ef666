"""What the backend decides: plain functions, without SGLang and without I/O."""
