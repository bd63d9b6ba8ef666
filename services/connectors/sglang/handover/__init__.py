"""Prefill and decode apart: the backend for `--disaggregation-transfer-backend mooncache`.

Idea: the prefill rank copies the rows of a request into staging memory and says what lies there. The decode rank reads
it with a transfer engine, verifies it and puts it into its own rows. So no rank ever writes into another's memory: an
abort needs no word from the other side, and bytes of a request that has ended cannot reach the next one.
"""
