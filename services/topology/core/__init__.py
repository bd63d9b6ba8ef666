"""Pure part of the topology: values in, statements out."""
