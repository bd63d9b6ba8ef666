"""`mooncache reproduce`: the published figures and tables of Mooncake, measured again by our simulator and policies.

Each scenario stands for one figure or table and gives rows: ours, the paper's number, their ratio. What the
paper leaves open is chosen once for all scenarios, in setting.py, with the reason beside it.
"""
