"""The OpenAI-compatible HTTP service: who asks, what it costs, where it goes, and the stream back.

`core` decides without doing (bodies, legs, usage, errors, limits), `shell` does (HTTP to clients and engines, calls to
the conductor), `endpoints` has one file per path, `background` one per duty.
"""
