"""Every exception that agn_optax raises on purpose.

    AgnOptaxError
    ├── InvalidArgumentError (ValueError)     a setting is outside what it may be
    │   └── InvalidTypeError (TypeError)      it is not that kind of thing at all
    ├── MissingArgumentError (ValueError)     an update lacks something it needs
    ├── TreeMismatchError (ValueError)        trees differ; the first path is named
    ├── UnboundAxisError (NameError)          the axis name is not bound here
    ├── CenterNotFoundError (LookupError)     an optimizer state holds no center
    ├── AmbiguousCenterError (LookupError)    ... or more than one
    ├── MissingExtraError (ImportError)       what an extra installs is not there
    └── CenterError                           a center refused a call
        ├── NotInitializedError               it has no parameters (yet)
        ├── AlreadyInitializedError           somebody else initialized it
        ├── WorkerStateError (RuntimeError)   calls came in an impossible order
        ├── NameTakenError                    another worker has that name
        ├── CenterFullError                   it has no room for one more worker
        ├── NotAllowedError (PermissionError) this caller may not do that
        ├── MessageRefusedError               it has refused too many messages in a row
        ├── RuleMismatchError                 worker and center run different rules
        ├── ProtocolError                     what came over the wire makes no sense
        ├── DurabilityError (OSError)         what it keeps on disk, or where, is unfit
        └── CenterUnreachableError            nobody answers (ConnectionError)
            ├── CenterBusyError               it answers, and takes that call later
            ├── CenterClosedError             it is going down, and said so
            └── EncryptionError               TLS of the two ends does not go together

Each is also the builtin exception that a caller would expect, so ``except ValueError``
keeps working. They are raised before anything changes: the state you hold is still
good.
"""

from __future__ import annotations


class AgnOptaxError(Exception):
    """The root: catches everything below and nothing else."""


class InvalidArgumentError(AgnOptaxError, ValueError):
    """A setting is outside what it may be; says what came and what was expected."""


class InvalidTypeError(InvalidArgumentError, TypeError):
    """A setting is not that kind of thing at all (``inner=None``, a boolean period)."""


class MissingArgumentError(AgnOptaxError, ValueError):
    """An update came without ``params`` or an extra argument that it needs."""


class TreeMismatchError(AgnOptaxError, ValueError):
    """Two trees differ in structure, shape or kind of leaf; names the first path."""


class UnboundAxisError(AgnOptaxError, NameError):
    """``axis_name`` is not bound by a vmap, pmap or shard_map around the update."""


class CenterNotFoundError(AgnOptaxError, LookupError):
    """The optimizer state holds no center."""


class AmbiguousCenterError(AgnOptaxError, LookupError):
    """The optimizer state holds more than one center, so "the center" means nothing."""


class MissingExtraError(AgnOptaxError, ImportError):
    """What an extra installs is not there; says which packages, and which extra."""


class CenterError(AgnOptaxError):
    """A center outside the program refused a call."""


class NotInitializedError(CenterError):
    """The center has no parameters yet: no chief has started."""


class AlreadyInitializedError(CenterError):
    """Another worker initialized the center; its parameters are kept."""


class WorkerStateError(CenterError, RuntimeError):
    """A worker's calls came in an impossible order: an exchange before its start."""


class NameTakenError(CenterError):
    """Another worker, which is there, has that name."""


class CenterFullError(CenterError):
    """The center has as many workers as it takes."""


class NotAllowedError(CenterError, PermissionError):
    """Who calls may not do that, or is unknown; says which role or name it takes."""

    is_known = True  # who calls


class MessageRefusedError(CenterError):
    """A center has refused too many messages of a worker in a row; says why."""


class RuleMismatchError(CenterError):
    """Worker and center do not run the same rule; names what differs."""


class ProtocolError(CenterError):
    """What came over the wire is no message of this protocol, or of another version."""


class DurabilityError(CenterError, OSError):
    """What a center keeps on disk cannot be read or written; says what and why."""


class CenterUnreachableError(CenterError, ConnectionError):
    """Nobody answers at the center's address; says which one, and since when."""


class CenterBusyError(CenterUnreachableError):
    """The center answers, and takes that call later; says why, as of too many calls."""


class CenterClosedError(CenterUnreachableError):
    """The center is going down; what it had not applied is to be sent again."""


class EncryptionError(CenterUnreachableError):
    """The ends do not agree on TLS: says whose certificate it is, and what is wrong."""


__all__ = [name for name in dir() if name.endswith("Error")]
