"""`mooncache tenant new-key`: a key file for blocks that are encrypted on disks, or a new key in it."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from mooncache.errors import ConfigInvalid, InvalidArgument
from mooncache.reporting.output import EXIT_OK, console
from mooncache.whole_file import write_whole


def new_key(
    name: Annotated[str, Parameter(help="Name of the tenant.")],
    /,
    *,
    folder: Annotated[Path, Parameter(help="Folder of key files, as store_node.tenant_keys_path names it.")],
) -> int:
    """Make a key for a tenant's blocks on disks and in the shared directory: NAME.key, mode 0600, in a folder.

    Where the file exists, the new key comes first: it encrypts from then on, and the older ones still decrypt. Nodes
    take the file over within seconds. Copy it to the key folder of every node by a way that you trust. Without the
    file encrypted blocks are misses for good, so keep it if you want to keep the blocks. The key is not printed.

    For example:

        mooncache tenant new-key team-a --folder /etc/mooncache/keys
    """
    from mooncache.auth import check_tenant_name
    from mooncache.store_node.tenant_keys import (
        KEY_BYTES,
        KEY_FILE_SUFFIX,
        KEYS_MAX,
        key_id,
        read_key_file,
    )

    path = folder.expanduser() / f"{check_tenant_name(name)}{KEY_FILE_SUFFIX}"
    keys = read_key_file(path) if path.exists() else []
    if len(keys) >= KEYS_MAX:
        raise InvalidArgument(f"{path} has {KEYS_MAX} keys already: delete the oldest ones, which come last.")
    keys.insert(0, secrets.token_bytes(KEY_BYTES))
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(path, "".join(f"{key.hex()}\n" for key in keys), to_disk=True)
    except OSError as error:
        raise ConfigInvalid(f"{path} cannot be written: {error.strerror}.") from None
    console.print(
        f"{path}: new blocks of {name} are encrypted with key {key_id(keys[0])}; keys in the file: {len(keys)}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    return EXIT_OK
