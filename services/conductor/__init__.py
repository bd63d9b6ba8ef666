"""The conductor: the global scheduler. It decides where a request is computed, what is fetched, and what is
refused.

Everything it knows is soft state that workers and gateways tell it again; its policies are in `core/policy`.
"""
