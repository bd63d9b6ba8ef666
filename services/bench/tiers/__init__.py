"""`mooncache bench tiers`: what the SSD tier does with a disk, and what the rest of a node notices of it.

Each module of this folder is one case and has `run(quick, progress) -> list[Row]`: `quick` asks for seconds instead of
a minute, `progress` takes a line of progress. A case starts what it needs and ends it. Its docstring's first line is
its entry in the list of cases. Files lie in a temporary folder (TMPDIR), on the disk that is measured.
"""
