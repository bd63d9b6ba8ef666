"""`mooncache bench sound`: does one slow, dead or greedy part slow down the others?

Each module of this folder is one case and has `run(quick, progress) -> list[Row]`: `quick` asks for seconds instead of
a minute, `progress` takes a line of progress. A case starts what it needs and ends it. Its docstring's first line is
its entry in the list of cases.
"""
