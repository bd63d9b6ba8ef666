"""The scheduling policies: pure functions over plain data.

`plan.choose` is the whole of it: which prefill instance and branch (`prefill`), which decode instance
(`decode`), and whether the request is taken at all (`admission`). The formulas are those of the Mooncake
papers (FAST'25, Algorithm 1 and section 5; arXiv 2407.00079, section 7) without their balancing threshold:
every branch is priced and the cheapest is taken.
"""
