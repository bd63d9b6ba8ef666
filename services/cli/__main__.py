"""`python -m mooncache.cli` is the same as `mooncache`."""

from mooncache.cli import main

main()
