"""Messages of Envoy that the endpoint picker uses, generated from protos/envoy."""
