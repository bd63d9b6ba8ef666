"""What engines and gateways share about KV blocks: identity, keys, and what a request says about its cache."""
