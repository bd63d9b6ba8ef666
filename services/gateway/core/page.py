"""Lists in pages, as OpenAI's API has them: `after` an id, at most `limit`."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any, Final, Protocol
from urllib.parse import parse_qsl

from mooncache.gateway.core.faults import bad_request

_FIELDS_MAX: Final = 32


class Listed(Protocol):
    """What can be listed."""

    id: str

    def described(self) -> dict[str, object]:
        """Its object of the API."""
        ...


def query_of(scope: MutableMapping[str, Any]) -> dict[str, str]:
    """The fields of a URL's query; the last of equal ones. Raises Refusal (400)."""
    try:
        return dict(parse_qsl(scope.get("query_string", b"").decode("latin-1"), max_num_fields=_FIELDS_MAX))
    except ValueError:
        raise bad_request(f"The query has more than {_FIELDS_MAX} fields.") from None


def page_of(items: Sequence[Listed], query: dict[str, str], *, most: int, usual: int) -> dict[str, object]:
    """One page of a list that is in its order. Raises Refusal (400)."""
    limit = query.get("limit", str(usual))
    if not limit.isascii() or not limit.isdigit() or not 1 <= int(limit[:9]) <= most:
        raise bad_request(f"`limit` has to be 1 to {most}.", "limit")
    begin, after = 0, query.get("after")
    if after:
        places = [place for place, item in enumerate(items) if item.id == after]
        if not places:
            raise bad_request("`after` names nothing in this list.", "after")
        begin = places[0] + 1
    page = items[begin : begin + int(limit)]
    return {
        "object": "list",
        "data": [item.described() for item in page],
        "first_id": page[0].id if page else None,
        "last_id": page[-1].id if page else None,
        "has_more": begin + len(page) < len(items),
    }
