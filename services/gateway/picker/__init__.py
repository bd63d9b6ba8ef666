"""The endpoint picker: a gateway whose HTTP is done by Envoy.

Envoy asks over its external processing (ext_proc) where a request goes, as the Gateway API Inference Extension defines.
Keys, limits, tokens, plans, prefill legs and reports are the gateway's; only the decode leg's bytes take Envoy's way.
"""
