"""Exceptions of the library as they travel, and back."""

from __future__ import annotations

from typing import Any, NoReturn

import grpc

from agn_optax import errors
from agn_optax.service import center_pb2 as pb

_KIND = "agn-optax-error"  # key of the trailing metadata that names the exception

_CODES: dict[type, grpc.StatusCode] = {
    errors.CenterClosedError: grpc.StatusCode.UNAVAILABLE,
    errors.CenterFullError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.NameTakenError: grpc.StatusCode.ALREADY_EXISTS,
    errors.AlreadyInitializedError: grpc.StatusCode.ALREADY_EXISTS,
    errors.NotInitializedError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.WorkerStateError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.RuleMismatchError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.DurabilityError: grpc.StatusCode.INTERNAL,
}
# What another try may cure.
_TRANSIENT = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.INTERNAL,  # what gRPC may make of a connection that just broke
}


def abort(context: grpc.ServicerContext, error: errors.AgnOptaxError) -> NoReturn:
    """Ends a call with an exception that the caller will see as it is."""
    context.set_trailing_metadata(((_KIND, type(error).__name__),))
    code = _CODES.get(type(error), grpc.StatusCode.INVALID_ARGUMENT)
    context.abort(code, str(error)[:4000])  # headers are bounded
    raise AssertionError


def is_transient(error: Any) -> bool:
    """Whether a call that failed is worth another try."""
    return error.code() in _TRANSIENT


def is_late(error: Any) -> bool:
    """Whether a call was given up because nothing came in time."""
    return error.code() == grpc.StatusCode.DEADLINE_EXCEEDED


def exception_of(error: Any, address: str) -> errors.AgnOptaxError:
    """The exception that a failed call stands for."""
    named = dict(error.trailing_metadata() or ()).get(_KIND)
    if named in errors.__all__:
        return _named(named, error.details())
    if is_transient(error):
        return errors.CenterUnreachableError(
            f"{error.code().name}: {error.details() or 'the connection broke'}"
        )
    if error.code() == grpc.StatusCode.UNIMPLEMENTED:
        return errors.ProtocolError(
            f"what answers at {address} is no center of agn_optax ({error.details()})"
        )
    return errors.CenterError(
        f"the center at {address} failed: {error.code().name}: {error.details()}"
    )


def refused(error: errors.AgnOptaxError | MemoryError) -> pb.Refused:
    """The end of a direct connection, with an exception that the worker will see."""
    if isinstance(error, MemoryError):
        error = no_memory()
    return pb.Refused(kind=type(error).__name__, details=str(error)[:4000])


def exception_in(said: pb.Refused) -> errors.AgnOptaxError:
    """The exception that a center has sent."""
    if said.kind in errors.__all__:
        return _named(said.kind, said.details)
    return errors.CenterError(f"{said.kind}: {said.details}")


def no_memory() -> errors.AgnOptaxError:
    """What a center without memory says."""
    return errors.CenterFullError("no memory for such a tree")


def _named(kind: str, details: str) -> errors.AgnOptaxError:
    return getattr(errors, kind)(details)
