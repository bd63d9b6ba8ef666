"""A small engine on Hugging Face transformers: shows how a custom engine uses the pool; serves where vLLM is absent.

Read it in this order: `core/` (blocks, sequences, scheduler: no torch, no I/O), `kv_memory` and `attention` (paged KV
under an unchanged transformers model), `model_runner`, `pool_link` (the only user of the SDK), `engine` (the thread
that ties them together), `requests`, `responses` and `server` (HTTP). docs/custom-engine.md explains it step by step.
"""
