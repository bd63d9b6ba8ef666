"""`mooncache chaos`: break a live cluster on this machine on purpose, check every answer meanwhile, and judge.

`core/` says which faults there are, in which order they come, and what the records of a run prove; `shell/` breaks,
asks and looks; `report_page.py` draws what happened.
"""
