"""The one place where the version is written; pyproject.toml and `mooncache version` read it."""

__version__ = "0.1.0"
