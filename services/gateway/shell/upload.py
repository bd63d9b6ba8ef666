"""A form with a file, taken in piece by piece: the file goes to disk as it comes, fields stay small."""

from __future__ import annotations

from collections.abc import Callable
from typing import IO, Final

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from mooncache.gateway.core import faults

_FIELD_BYTES_MAX: Final = 4096
_FIELDS_MAX: Final = 32
_NAME_CHARS_MAX: Final = 256


class Upload:
    """Parses multipart/form-data. `write` takes the body's pieces; after `close` `fields` and `filename` are known.

    into: what the part `file` is written to. Raises Refusal (400) for what is no such form.
    """

    def __init__(self, content_type: str, into: IO[bytes]) -> None:
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary", b"")
        if kind != b"multipart/form-data" or not boundary:
            raise faults.bad_request(
                "Send the file as multipart/form-data, with the fields `purpose` and `file`."
            )
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self._into = into
        self._ended = False
        self._header, self._value = bytearray(), bytearray()
        self._disposition = b""
        self._field: str | None = None
        self._data = bytearray()
        self._is_file = False
        calls: dict[str, Callable[..., None]] = {
            "on_part_begin": self._part_begins,
            "on_header_field": self._header_name,
            "on_header_value": self._header_value,
            "on_header_end": self._header_ends,
            "on_headers_finished": self._headers_end,
            "on_part_data": self._part_data,
            "on_part_end": self._part_ends,
            "on_end": self._all_ends,
        }
        try:
            self._parser = MultipartParser(boundary, calls)  # type: ignore[arg-type]
        except FormParserError as error:
            raise faults.bad_request(f"The form cannot be read: {error}.") from None

    def write(self, data: bytes) -> None:
        """The next piece of the body. Raises Refusal; OSError when the disk is full."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise faults.bad_request(f"The form cannot be read: {error}.") from None

    def close(self) -> None:
        """All of it was there. Raises Refusal when not."""
        if not self._ended:
            raise faults.bad_request("The form ends in the middle of a part.")
        if self.filename is None:
            raise faults.bad_request("The form has no `file`.", "file")

    def _part_begins(self) -> None:
        self._header.clear()
        self._value.clear()
        self._disposition, self._field, self._is_file = b"", None, False
        self._data.clear()

    def _header_name(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]
        if len(self._value) > _FIELD_BYTES_MAX:
            raise faults.bad_request("A header of the form is too long.")

    def _header_ends(self) -> None:
        if bytes(self._header).lower() == b"content-disposition":
            self._disposition = bytes(self._value)
        self._header.clear()
        self._value.clear()

    def _headers_end(self) -> None:
        _, options = parse_options_header(self._disposition)
        name = options.get(b"name", b"").decode("utf-8", "replace")
        self._is_file = name == "file"
        if self._is_file:
            if self.filename is not None:
                raise faults.bad_request("The form has more than one `file`.", "file")
            self.filename = _clean(options.get(b"filename", b"").decode("utf-8", "replace"))
        elif len(self.fields) >= _FIELDS_MAX:
            raise faults.bad_request(f"The form has more than {_FIELDS_MAX} fields.")
        else:
            self._field = name

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self._into.write(data[start:end])
            return
        self._data += data[start:end]
        if len(self._data) > _FIELD_BYTES_MAX:
            raise faults.bad_request(f"A field of the form is longer than {_FIELD_BYTES_MAX} bytes.")

    def _part_ends(self) -> None:
        if self._field is not None:
            self.fields[self._field] = self._data.decode("utf-8", "replace")

    def _all_ends(self) -> None:
        self._ended = True


def _clean(filename: str) -> str:
    """A file's name for its owner to read: no path, nothing that cannot be printed."""
    last = filename.replace("\\", "/").rpartition("/")[2]
    return "".join(char for char in last if char.isprintable())[:_NAME_CHARS_MAX] or "upload"
