"""Messages of KEDA that the conductor uses, generated from protos/keda."""
