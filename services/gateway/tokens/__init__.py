"""From the body of a request to the token ids that the engine will compute for it.

`PromptReader` is all that the gateway uses. It answers None whenever it cannot be sure: such a request is served
without block keys, which costs a cache hit and never an answer.
"""

from __future__ import annotations

from mooncache.gateway.tokens.reader import Prompt, PromptReader

__all__ = ["Prompt", "PromptReader"]
