"""Mooncache: a verified, shared KV cache pool for LLM serving."""
