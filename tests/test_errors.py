"""The catalogue of errors: complete, equal to the native one, and able to travel over gRPC."""

import pickle
import re
from pathlib import Path

import grpc
import pytest

from mooncache import errors
from mooncache.runtime.grpc_status import of_library, to_library

HEADER = Path(__file__).parents[1] / "native" / "include" / "mooncache" / "status.h"
SOURCE = Path(__file__).parents[1] / "native" / "src" / "base" / "status.cpp"


def native_codes() -> dict[str, int]:
    body = re.search(r"enum class Code : uint16_t \{(.*?)\};", HEADER.read_text(), re.S)
    assert body is not None
    names = dict(re.findall(r'\{Code::(k\w+), "(\w+)"\}', SOURCE.read_text()))
    return {names[symbol]: int(number) for symbol, number in re.findall(r"(k\w+) = (\d+),", body.group(1))}


def test_catalogue_equals_native_header() -> None:
    shared = [error for error in errors.catalogue() if not 700 <= error.code <= 799]  # serving is Python only
    assert {"OK": 0} | {error.name: error.code for error in shared} == native_codes()


@pytest.mark.parametrize("error_class", errors.catalogue(), ids=lambda cls: cls.name)
def test_every_class_is_complete_and_survives_the_wire(error_class: type[errors.MooncacheError]) -> None:
    assert error_class.hint.endswith(".") and len(error_class.hint) > 20
    error = errors.error_for(error_class.code, "what happened")
    assert type(error) is error_class and error.message == "what happened"
    assert error_class().message == error_class.hint
    status = of_library(to_library(error.grpc_status))
    back = errors.from_grpc(status, error.message, errors.to_metadata(error))
    assert type(back) is error_class and back.message == "what happened"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert errors.code_name(error_class.code) == error_class.name


def test_the_drawing_of_the_catalogue_is_complete() -> None:
    assert errors.__doc__ is not None
    drawn = set(re.findall(r"\w+", errors.__doc__.partition("MooncacheError\n")[2]))
    assert {error.__name__ for error in errors.catalogue()} <= drawn


def test_retryable_codes_are_the_agreed_ones() -> None:
    retryable = {error.code for error in errors.catalogue() if error.retryable}
    assert retryable == {105, 203, 300, 301, 303, 400, 401, 403, 405, 406, 407, 600, 602} | {
        701,
        702,
        703,
        704,
        706,
        707,
        708,
        711,
        712,
        715,
    }


def test_refusals_of_grpc_itself() -> None:
    unavailable = errors.from_grpc(errors.GrpcStatus.UNAVAILABLE, "no", None, errors.NodeUnavailable)
    assert type(unavailable) is errors.NodeUnavailable
    assert type(errors.from_grpc(errors.GrpcStatus.UNAVAILABLE, "no", ())) is errors.MasterUnavailable
    assert type(errors.from_grpc(errors.GrpcStatus.DEADLINE_EXCEEDED, None, ())) is errors.DeadlineExceeded
    assert type(errors.from_grpc(errors.GrpcStatus.UNKNOWN, None, ())) is errors.Internal


@pytest.mark.parametrize("value", ["", "-1", "abc", "9" * 400, "²", b"\xff\xfe"])
def test_hostile_code_metadata_is_ignored(value: str | bytes) -> None:
    error = errors.from_grpc(errors.GrpcStatus.NOT_FOUND, "x", (("mooncache-code", value),))
    assert type(error) is errors.NotFound


def test_unknown_numbers() -> None:
    assert type(errors.error_for(65000, "new thing")) is errors.Internal
    assert "65000" in errors.error_for(65000).message
    assert (errors.code_name(0), errors.code_name(65000)) == ("OK", "UNKNOWN")


def test_statuses_are_those_of_grpc() -> None:
    assert {status.name for status in errors.GrpcStatus} == {status.name for status in grpc.StatusCode}
    assert all(of_library(status).value == status.name for status in grpc.StatusCode)
