"""`mooncache conformance`: promises that a store, an engine or a connector should keep, tried on one, with verdicts.

`core/` has verdicts and the bytes that are put; `store_contract.py` says what a store under test offers, and
`stores/` makes ours fit it; `store_promises/` tries one family of promises a file; `report_page.py` draws the verdicts.
`engine_*` and `connector_*` do the same for an engine behind a URL, and for a connector of vLLM in engines of the run.
"""
