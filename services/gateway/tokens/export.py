"""Prints the tokenizer that transformers makes of a folder: `python -m mooncache.gateway.tokens.export FOLDER`.

The last line of the output is a JSON object: `tokenizer`, the content of a tokenizer.json, and `special_tokens`.
"""

from __future__ import annotations

import json
import os
import sys


def main(folder: str) -> int:
    """Load without network. The exit status is 1 for a tokenizer that the tokenizers library does not support."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(folder)
    backend = getattr(loaded, "backend_tokenizer", None)
    if backend is None:
        sys.stderr.write(f"{type(loaded).__name__} is written in Python\n")
        return 1
    specials = {
        name: str(token) for name, token in loaded.special_tokens_map.items() if isinstance(token, str)
    }
    sys.stdout.write("\n" + json.dumps({"tokenizer": backend.to_str(), "special_tokens": specials}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
