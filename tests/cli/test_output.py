"""What the commands print is what they have read."""

from __future__ import annotations

from mooncache.reporting import output


def test_a_fingerprint_is_printed_as_it_is() -> None:
    fingerprint = "E7:AB:84:OK:0A"
    for console in (output.console, output.error_console):
        with console.capture() as captured:
            console.print(fingerprint)
        assert captured.get() == fingerprint + "\n"
