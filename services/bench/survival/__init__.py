"""`mooncache bench survival`: what the loss of a part costs, and how soon all is as it should be again.

Each module of this folder is one case and has `run(quick, progress) -> list[Row]`, as in `mooncache bench sound`.
"""
