"""`mooncache bench sound`: does one slow, dead or greedy part stay the trouble of nobody else?

Each module of this folder is one case and has `run(quick, tell) -> list[Row]`: `quick` asks for seconds instead of a
minute, `tell` takes a line of progress. A case starts what it needs and ends it. Its docstring's first line is its
entry in the list of cases.
"""
