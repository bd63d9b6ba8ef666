"""The metadata master.

Membership, cluster map, directory and tasks, all derived from what the store nodes say.
"""
