"""What operators ask of keys and limits on the console."""

from __future__ import annotations

from typing import Annotated, Final, TypeVar

import msgspec

from mooncache.accounts.core.api_key import KeyScope, is_key_id
from mooncache.accounts.core.request_limits import AMOUNT_MAX, LIMIT_NAMES, PRIORITY_MAX
from mooncache.errors import InvalidArgument

BODY_BYTES_MAX: Final = 4096
_EXPIRES_S_MAX: Final = 253_402_300_799  # the last second of the year 9999
_Moment = Annotated[int, msgspec.Meta(ge=0, le=_EXPIRES_S_MAX)]
_Text = Annotated[str, msgspec.Meta(max_length=256)]
_Amount = Annotated[float, msgspec.Meta(ge=0, le=AMOUNT_MAX)]
_Whole = Annotated[int, msgspec.Meta(ge=0, le=int(AMOUNT_MAX))]
_Steps = Annotated[int, msgspec.Meta(ge=-PRIORITY_MAX, le=PRIORITY_MAX)]


class AskedKey(msgspec.Struct, forbid_unknown_fields=True):
    """A key to make: `{"tenant": "team-a", "scopes": ["inference"]}`. An end of 0 is none."""

    tenant: _Text
    scopes: Annotated[list[KeyScope], msgspec.Meta(min_length=1, max_length=len(KeyScope))]
    expires_unix_s: _Moment = 0
    name: _Text = ""


class AskedLimits(msgspec.Struct, forbid_unknown_fields=True):
    """Limits of a tenant, or of one of its keys. What is not named stays as it is; 0 takes a limit away."""

    tenant: _Text
    key_id: _Text = ""
    requests_per_minute: _Amount | None = None
    tokens_per_minute: _Amount | None = None
    requests_under_way: _Whole | None = None
    tokens_under_way: _Whole | None = None
    money_per_month: _Amount | None = None
    priority: _Steps | None = None

    def given(self) -> dict[str, float]:
        """Those that were named."""
        values = ((name, getattr(self, name)) for name in LIMIT_NAMES)
        return {name: value for name, value in values if value is not None}


_Asked = TypeVar("_Asked", AskedKey, AskedLimits)
_KEY: Final = msgspec.json.Decoder(AskedKey)
_LIMITS: Final = msgspec.json.Decoder(AskedLimits)


def parse_key(body: bytes) -> AskedKey:
    """Raises InvalidArgument for what is no such question."""
    return _parsed(_KEY, body)


def parse_limits(body: bytes) -> AskedLimits:
    """Raises InvalidArgument for what is no such question, or names no limit, or what can be the id of no key."""
    asked = _parsed(_LIMITS, body)
    if asked.key_id and not is_key_id(asked.key_id):
        raise InvalidArgument("An id of a key has 16 hexadecimal digits.")
    if not asked.given():
        raise InvalidArgument(f"Name at least one of {', '.join(LIMIT_NAMES)}.")
    return asked


def _parsed(decoder: msgspec.json.Decoder[_Asked], body: bytes) -> _Asked:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidArgument(f"The body is not what this takes: {str(error)[:200]}.") from None
