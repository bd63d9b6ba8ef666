"""Traces of requests: read, checked, written, made up, and described. Needs NumPy (extras `simulate`, `serve`)."""

from mooncache.traces.generator import GenerateOptions, generate
from mooncache.traces.reader import read
from mooncache.traces.trace import BLOCK_TOKENS, Trace, TracePart
from mooncache.traces.writer import write

__all__ = ["BLOCK_TOKENS", "GenerateOptions", "Trace", "TracePart", "generate", "read", "write"]
