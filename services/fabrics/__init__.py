"""Fabrics that other people's libraries drive, behind the contract of the native transports."""
