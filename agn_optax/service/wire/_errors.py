"""Conversion of the library's exceptions to gRPC statuses and back."""

from __future__ import annotations

from typing import Any

import grpc

from agn_optax import errors
from agn_optax.service import center_pb2 as pb

_KIND = "agn-optax-error"  # key of the trailing metadata that names the exception

_CODES: dict[type, grpc.StatusCode] = {
    errors.CenterBusyError: grpc.StatusCode.UNAVAILABLE,
    errors.CenterClosedError: grpc.StatusCode.UNAVAILABLE,
    errors.CenterUnreachableError: grpc.StatusCode.UNAVAILABLE,
    errors.CenterFullError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.NameTakenError: grpc.StatusCode.ALREADY_EXISTS,
    errors.AlreadyInitializedError: grpc.StatusCode.ALREADY_EXISTS,
    errors.NotAllowedError: grpc.StatusCode.PERMISSION_DENIED,
    errors.NotInitializedError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.WorkerStateError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.OtherHistoryError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.RuleMismatchError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.DurabilityError: grpc.StatusCode.INTERNAL,
}
# Codes for which a retry may succeed.
_TRANSIENT = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.INTERNAL,  # used by gRPC for some broken connections
}

_NOT_ALLOWED = {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED}
# Codes from servers that are not centers; their health service gives NOT_FOUND.
_NOT_A_CENTER = {grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.NOT_FOUND}


def abort(context: grpc.ServicerContext, error: Exception) -> None:
    """End a call with an exception, which is raised again at the caller."""
    failure = failure_of(error)
    kind = getattr(errors, failure.kind)
    context.set_trailing_metadata(((_KIND, failure.kind),))
    code = _CODES.get(kind, grpc.StatusCode.INVALID_ARGUMENT)
    if isinstance(error, errors.NotAllowedError) and not error.is_known:
        code = grpc.StatusCode.UNAUTHENTICATED
    context.abort(code, failure.details)


def exception_of(error: Any, address: str) -> errors.AgnOptaxError:
    """Return the library's exception for a failed gRPC call."""
    kind = dict(error.trailing_metadata() or ()).get(_KIND)
    code, details = error.code(), error.details() or ""
    if kind in errors.__all__:
        return getattr(errors, kind)(details)
    # gRPC's error if the server has reached its maximum number of concurrent calls.
    is_full = code == grpc.StatusCode.RESOURCE_EXHAUSTED and "Concurrent" in details
    if code in _TRANSIENT or is_full:
        return errors.CenterUnreachableError(
            f"{code.name}: {details or 'the connection broke'}"
        )
    if code in _NOT_ALLOWED:  # not from a center, so perhaps from a proxy
        return errors.NotAllowedError(f"{code.name}: {details}")
    if code in _NOT_A_CENTER:
        return errors.ProtocolError(
            f"the server at {address} is not a center of agn_optax ({details})"
        )
    return errors.CenterError(f"the center at {address} failed: {code.name}: {details}")


def failure_of(error: Exception) -> pb.Failure:
    """Return an exception's kind and text as a protobuf message."""
    if isinstance(error, MemoryError):
        error = errors.CenterFullError("not enough memory for this tree")
    elif isinstance(error, EOFError):
        error = errors.ProtocolError(str(error))
    elif not isinstance(error, errors.AgnOptaxError):
        error = errors.CenterError(f"the center failed: {error!r}")
    details = str(error)[:4000]  # gRPC limits the size of metadata
    return pb.Failure(kind=type(error).__name__, details=details)


def exception_in(failure: pb.Failure) -> errors.AgnOptaxError:
    """Return the exception in a protobuf message from a center."""
    if failure.kind in errors.__all__:
        return getattr(errors, failure.kind)(failure.details)
    return errors.CenterError(f"{failure.kind}: {failure.details}")
