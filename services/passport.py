"""The same as `mooncache.kvcache.passport`: the name under which engines outside of this repository import it."""

from mooncache.kvcache.passport import Passport, key_of_name

__all__ = ["Passport", "key_of_name"]
