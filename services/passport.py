"""The same as `mooncache.kvcache.passport`: the name under which engines outside of this repository import it."""

from mooncache.client.keys import KEY_BYTES, split_keys
from mooncache.kvcache.passport import Passport, key_of_name

__all__ = ["KEY_BYTES", "Passport", "key_of_name", "split_keys"]
