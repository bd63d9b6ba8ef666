"""What every section of the configuration is made of: the base model and the types of values."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from mooncache.config.accounts_place import DatabaseUrl, place_of

PortNumber = Annotated[int, Field(ge=0, le=65535)]


def _path(value: object) -> object:
    """A path with "~" resolved; None from an empty text."""
    if isinstance(value, (str, Path)):
        return Path(value).expanduser() if str(value) else None
    return value


def _words(value: object) -> object:
    """A list from "a,b" (environment) or a TOML array."""
    return (
        tuple(word.strip() for word in value.split(",") if word.strip()) if isinstance(value, str) else value
    )


FilePath = Annotated[Path, BeforeValidator(_path)]
OptionalPath = Annotated[Path | None, BeforeValidator(_path)]
AccountsFolderOrUrl = Annotated[Path | DatabaseUrl | None, BeforeValidator(place_of)]
Words = Annotated[tuple[str, ...], BeforeValidator(_words)]


class Section(BaseModel):
    """Base of all sections: frozen, unknown names refused."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, use_attribute_docstrings=True
    )
