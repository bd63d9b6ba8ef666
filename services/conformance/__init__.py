"""`mooncache conformance`: promises that a KV store should keep, tried on one, with a verdict for each.

`core/` has verdicts and the bytes that are put; `store_contract.py` says what a store under test offers, and
`stores/` makes ours fit it; `store_promises/` tries one family of promises a file; `report_page.py` draws the verdicts.
"""
