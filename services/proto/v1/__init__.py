"""Messages of mooncache.v1, generated from protos/v1."""
