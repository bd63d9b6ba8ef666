"""Capacity planning: the cheapest cluster that serves a trace within its SLOs, and how sure that is.

`core` holds the pure parts: what a plan is asked (`spec`), how a measured profile becomes an instance on other
hardware (`machine`), the statistical model (`reuse`, `prefill`, `decode`), the search and its prices. Around it:
reading TOML, the simulator for the finalists, and the files and pages that come out.
"""
