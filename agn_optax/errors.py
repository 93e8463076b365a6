"""Every exception that agn_optax raises on purpose.

    AgnOptaxError
    ├── InvalidArgumentError (ValueError)     a setting has an invalid value
    │   └── InvalidTypeError (TypeError)      a setting has the wrong type
    ├── MissingArgumentError (ValueError)     an update lacks an argument it needs
    ├── TreeMismatchError (ValueError)        trees differ; the first path is named
    ├── UnboundAxisError (NameError)          the axis name is not bound here
    ├── CenterNotFoundError (LookupError)     an optimizer state holds no center
    ├── AmbiguousCenterError (LookupError)    an optimizer state holds several centers
    ├── MissingExtraError (ImportError)       optional packages are not installed
    └── CenterError                           a call to a center failed
        ├── NotInitializedError               the center has no parameters yet
        ├── AlreadyInitializedError           the center already has parameters
        ├── WorkerStateError (RuntimeError)   calls came in an impossible order
        ├── NameTakenError                    another worker has that name
        ├── CenterFullError                   the center's limit of workers is reached
        ├── NotAllowedError (PermissionError) this caller may not do that
        ├── MessageRejectedError              too many messages in a row were rejected
        ├── RuleMismatchError                 worker and center run different rules
        ├── OtherHistoryError                 the center lacks what the worker has seen
        ├── ProtocolError                     invalid data came over the wire
        ├── DurabilityError (OSError)         files cannot be read or written
        └── CenterUnreachableError            no answer came (ConnectionError)
            ├── CenterBusyError               the center asks for a retry later
            ├── CenterClosedError             the center is shutting down
            └── EncryptionError               the TLS settings of the ends do not match

Each class with a builtin exception in parentheses is also a subclass of it, so
``except ValueError`` keeps working. The exceptions are raised before anything changes:
the state that the caller holds is still valid. (After an exchange that raised, repeat
the call, even if it has donated its arrays: see `Worker.exchange`.)
"""

from __future__ import annotations


class AgnOptaxError(Exception):
    """The base class of every exception of agn_optax, and of no other exception."""


class InvalidArgumentError(AgnOptaxError, ValueError):
    """An invalid value of a setting; names the value and the expected ones."""


class InvalidTypeError(InvalidArgumentError, TypeError):
    """A setting of the wrong type, such as ``inner=None`` or a boolean period."""


class MissingArgumentError(AgnOptaxError, ValueError):
    """An update without ``params``, or without an extra argument that it needs."""


class TreeMismatchError(AgnOptaxError, ValueError):
    """Two trees that differ in structure, shapes or dtypes; names the first path."""


class UnboundAxisError(AgnOptaxError, NameError):
    """An ``axis_name`` that no vmap, pmap or shard_map around the update binds."""


class CenterNotFoundError(AgnOptaxError, LookupError):
    """An optimizer state that holds no center."""


class AmbiguousCenterError(AgnOptaxError, LookupError):
    """An optimizer state that holds several centers, so "the center" is ambiguous."""


class MissingExtraError(AgnOptaxError, ImportError):
    """Optional packages that are not installed; names them, and what installs them."""


class CenterError(AgnOptaxError):
    """A failed call to a center outside the program."""


class NotInitializedError(CenterError):
    """A center without parameters: no chief has started yet."""


class AlreadyInitializedError(CenterError):
    """A center that already has parameters, such as another worker's; it keeps them."""


class WorkerStateError(CenterError, RuntimeError):
    """Calls of a worker in an impossible order, such as an exchange before a start."""


class NameTakenError(CenterError):
    """A worker name that another registered worker has."""


class CenterFullError(CenterError):
    """A center that has its maximum number of workers."""


class NotAllowedError(CenterError, PermissionError):
    """A caller without permission, or an unknown one; names the role or name needed."""

    is_known = True  # False if the caller is unknown


class MessageRejectedError(CenterError):
    """Too many rejected messages of one worker in a row; gives the reason."""


class RuleMismatchError(CenterError):
    """Different rules in worker and center; names the parts that differ."""


class OtherHistoryError(CenterError):
    """A center without a record that the worker has seen: an old copy, or a fork."""


class ProtocolError(CenterError):
    """Data over the wire that is no message of this version of the protocol."""


class DurabilityError(CenterError, OSError):
    """Files on disk that cannot be read or written; names the path and the reason."""


class CenterUnreachableError(CenterError, ConnectionError):
    """A center that does not answer; names its address and since when."""


class CenterBusyError(CenterUnreachableError):
    """A center that asks for a retry later; gives the reason, such as a rate limit."""


class CenterClosedError(CenterUnreachableError):
    """A center that is shutting down; resend the messages that it has not applied."""


class EncryptionError(CenterUnreachableError):
    """A failed TLS handshake; names the certificate and what is wrong with it."""


__all__ = [name for name in dir() if name.endswith("Error")]
