"""Control calls that every process answers beside its own service, one file each."""
