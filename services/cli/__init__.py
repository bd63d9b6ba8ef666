"""The command `mooncache`: for people by default, for programs with --json."""

from __future__ import annotations


def main() -> None:
    """Entry point of the command."""
    from mooncache.cli.app import run

    raise SystemExit(run())
