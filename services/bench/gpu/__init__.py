"""What GPU memory costs: staging and gathering against the driver's own copies, and an engine on a GPU with the pool.

`mooncache bench transfer --memory cuda` runs the copies; `python -m mooncache.bench.gpu` runs everything.
"""
