"""The hand-over between prefill and decode, case by case: `mooncache bench handover`."""
