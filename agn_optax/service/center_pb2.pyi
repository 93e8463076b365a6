from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Frames(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Header(_message.Message):
    __slots__ = ("join", "joined", "message", "snapshot", "acknowledge", "waiting", "failure", "start", "parameters", "attach", "attached", "segment", "answer_segment")
    JOIN_FIELD_NUMBER: _ClassVar[int]
    JOINED_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGE_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    ANSWER_SEGMENT_FIELD_NUMBER: _ClassVar[int]
    join: Join
    joined: Joined
    message: Message
    snapshot: Snapshot
    acknowledge: int
    waiting: Waiting
    failure: Failure
    start: Start
    parameters: Parameters
    attach: Segment
    attached: Attached
    segment: int
    answer_segment: int
    def __init__(self, join: _Optional[_Union[Join, _Mapping]] = ..., joined: _Optional[_Union[Joined, _Mapping]] = ..., message: _Optional[_Union[Message, _Mapping]] = ..., snapshot: _Optional[_Union[Snapshot, _Mapping]] = ..., acknowledge: _Optional[int] = ..., waiting: _Optional[_Union[Waiting, _Mapping]] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ..., start: _Optional[_Union[Start, _Mapping]] = ..., parameters: _Optional[_Union[Parameters, _Mapping]] = ..., attach: _Optional[_Union[Segment, _Mapping]] = ..., attached: _Optional[_Union[Attached, _Mapping]] = ..., segment: _Optional[int] = ..., answer_segment: _Optional[int] = ...) -> None: ...

class Offer(_message.Message):
    __slots__ = ("transport", "address", "key")
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    transport: str
    address: str
    key: bytes
    def __init__(self, transport: _Optional[str] = ..., address: _Optional[str] = ..., key: _Optional[bytes] = ...) -> None: ...

class Segment(_message.Message):
    __slots__ = ("number", "size")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    number: int
    size: int
    def __init__(self, number: _Optional[int] = ..., size: _Optional[int] = ...) -> None: ...

class Attached(_message.Message):
    __slots__ = ("error",)
    ERROR_FIELD_NUMBER: _ClassVar[int]
    error: str
    def __init__(self, error: _Optional[str] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("kind", "details")
    KIND_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    kind: str
    details: str
    def __init__(self, kind: _Optional[str] = ..., details: _Optional[str] = ...) -> None: ...

class Leaf(_message.Message):
    __slots__ = ("path", "dtype", "shape")
    PATH_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    path: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, path: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class Schema(_message.Message):
    __slots__ = ("structure", "leaves")
    STRUCTURE_FIELD_NUMBER: _ClassVar[int]
    LEAVES_FIELD_NUMBER: _ClassVar[int]
    structure: str
    leaves: bytes
    def __init__(self, structure: _Optional[str] = ..., leaves: _Optional[bytes] = ...) -> None: ...

class Print(_message.Message):
    __slots__ = ("part", "setting", "numbers")
    PART_FIELD_NUMBER: _ClassVar[int]
    SETTING_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    part: str
    setting: str
    numbers: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, part: _Optional[str] = ..., setting: _Optional[str] = ..., numbers: _Optional[_Iterable[float]] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ("protocol",)
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    def __init__(self, protocol: _Optional[int] = ...) -> None: ...

class Description(_message.Message):
    __slots__ = ("protocol", "release", "center", "rule", "schema", "schema_hash", "dtype", "mode", "barrier", "offers", "lease", "heartbeat", "waiting_interval", "calls", "version")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    CENTER_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_HASH_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    BARRIER_FIELD_NUMBER: _ClassVar[int]
    OFFERS_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    WAITING_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    release: str
    center: str
    rule: _containers.RepeatedCompositeFieldContainer[Print]
    schema: bytes
    schema_hash: bytes
    dtype: str
    mode: str
    barrier: int
    offers: _containers.RepeatedCompositeFieldContainer[Offer]
    lease: float
    heartbeat: float
    waiting_interval: float
    calls: _containers.RepeatedScalarFieldContainer[str]
    version: int
    def __init__(self, protocol: _Optional[int] = ..., release: _Optional[str] = ..., center: _Optional[str] = ..., rule: _Optional[_Iterable[_Union[Print, _Mapping]]] = ..., schema: _Optional[bytes] = ..., schema_hash: _Optional[bytes] = ..., dtype: _Optional[str] = ..., mode: _Optional[str] = ..., barrier: _Optional[int] = ..., offers: _Optional[_Iterable[_Union[Offer, _Mapping]]] = ..., lease: _Optional[float] = ..., heartbeat: _Optional[float] = ..., waiting_interval: _Optional[float] = ..., calls: _Optional[_Iterable[str]] = ..., version: _Optional[int] = ...) -> None: ...

class Join(_message.Message):
    __slots__ = ("protocol", "worker", "session_id", "center", "share_size", "witnesses")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    CENTER_FIELD_NUMBER: _ClassVar[int]
    SHARE_SIZE_FIELD_NUMBER: _ClassVar[int]
    WITNESSES_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    worker: str
    session_id: str
    center: str
    share_size: int
    witnesses: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, protocol: _Optional[int] = ..., worker: _Optional[str] = ..., session_id: _Optional[str] = ..., center: _Optional[str] = ..., share_size: _Optional[int] = ..., witnesses: _Optional[_Iterable[str]] = ...) -> None: ...

class Share(_message.Message):
    __slots__ = ("group", "process", "processes", "owned", "wanted")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    PROCESSES_FIELD_NUMBER: _ClassVar[int]
    OWNED_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    group: str
    process: int
    processes: int
    owned: bytes
    wanted: bytes
    def __init__(self, group: _Optional[str] = ..., process: _Optional[int] = ..., processes: _Optional[int] = ..., owned: _Optional[bytes] = ..., wanted: _Optional[bytes] = ...) -> None: ...

class Region(_message.Message):
    __slots__ = ("leaf", "start", "shape")
    LEAF_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    leaf: int
    start: _containers.RepeatedScalarFieldContainer[int]
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, leaf: _Optional[int] = ..., start: _Optional[_Iterable[int]] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class Joined(_message.Message):
    __slots__ = ("center",)
    CENTER_FIELD_NUMBER: _ClassVar[int]
    center: str
    def __init__(self, center: _Optional[str] = ...) -> None: ...

class Message(_message.Message):
    __slots__ = ("sequence", "anchor_version", "schema_hash", "dtype", "steps", "weight", "reported", "notices", "attempt", "transfer", "late_steps")
    class ReportedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class NoticesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ANCHOR_VERSION_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_HASH_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    REPORTED_FIELD_NUMBER: _ClassVar[int]
    NOTICES_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    LATE_STEPS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    anchor_version: int
    schema_hash: bytes
    dtype: str
    steps: int
    weight: float
    reported: _containers.ScalarMap[str, float]
    notices: _containers.ScalarMap[str, str]
    attempt: int
    transfer: Transfer
    late_steps: int
    def __init__(self, sequence: _Optional[int] = ..., anchor_version: _Optional[int] = ..., schema_hash: _Optional[bytes] = ..., dtype: _Optional[str] = ..., steps: _Optional[int] = ..., weight: _Optional[float] = ..., reported: _Optional[_Mapping[str, float]] = ..., notices: _Optional[_Mapping[str, str]] = ..., attempt: _Optional[int] = ..., transfer: _Optional[_Union[Transfer, _Mapping]] = ..., late_steps: _Optional[int] = ...) -> None: ...

class Transfer(_message.Message):
    __slots__ = ("interface", "nbytes", "seconds")
    INTERFACE_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    interface: str
    nbytes: int
    seconds: float
    def __init__(self, interface: _Optional[str] = ..., nbytes: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class Start(_message.Message):
    __slots__ = ("protocol", "worker", "schema_hash", "schema_size", "share_size")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_HASH_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_SIZE_FIELD_NUMBER: _ClassVar[int]
    SHARE_SIZE_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    worker: str
    schema_hash: bytes
    schema_size: int
    share_size: int
    def __init__(self, protocol: _Optional[int] = ..., worker: _Optional[str] = ..., schema_hash: _Optional[bytes] = ..., schema_size: _Optional[int] = ..., share_size: _Optional[int] = ...) -> None: ...

class Parameters(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Initialized(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: int
    def __init__(self, version: _Optional[int] = ...) -> None: ...

class PullRequest(_message.Message):
    __slots__ = ("wait",)
    WAIT_FIELD_NUMBER: _ClassVar[int]
    wait: float
    def __init__(self, wait: _Optional[float] = ...) -> None: ...

class Snapshot(_message.Message):
    __slots__ = ("version", "schema_hash", "sequence", "applied", "rejected", "staleness", "norm", "pace", "held", "notices", "witness")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_HASH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    NORM_FIELD_NUMBER: _ClassVar[int]
    PACE_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    NOTICES_FIELD_NUMBER: _ClassVar[int]
    WITNESS_FIELD_NUMBER: _ClassVar[int]
    version: int
    schema_hash: bytes
    sequence: int
    applied: bool
    rejected: str
    staleness: int
    norm: float
    pace: float
    held: float
    notices: _containers.RepeatedCompositeFieldContainer[Notice]
    witness: str
    def __init__(self, version: _Optional[int] = ..., schema_hash: _Optional[bytes] = ..., sequence: _Optional[int] = ..., applied: bool = ..., rejected: _Optional[str] = ..., staleness: _Optional[int] = ..., norm: _Optional[float] = ..., pace: _Optional[float] = ..., held: _Optional[float] = ..., notices: _Optional[_Iterable[_Union[Notice, _Mapping]]] = ..., witness: _Optional[str] = ...) -> None: ...

class Waiting(_message.Message):
    __slots__ = ("missing",)
    MISSING_FIELD_NUMBER: _ClassVar[int]
    missing: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, missing: _Optional[_Iterable[int]] = ...) -> None: ...

class Session(_message.Message):
    __slots__ = ("worker", "session_id")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    worker: str
    session_id: str
    def __init__(self, worker: _Optional[str] = ..., session_id: _Optional[str] = ...) -> None: ...

class AliveRequest(_message.Message):
    __slots__ = ("sessions",)
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedCompositeFieldContainer[Session]
    def __init__(self, sessions: _Optional[_Iterable[_Union[Session, _Mapping]]] = ...) -> None: ...

class AliveReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ("worker", "session_id", "group")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    worker: str
    session_id: str
    group: str
    def __init__(self, worker: _Optional[str] = ..., session_id: _Optional[str] = ..., group: _Optional[str] = ...) -> None: ...

class LeaveReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("name", "connected", "waits", "stalled", "exchanges", "dropped", "rejected", "staleness", "norm", "period", "exchanges_per_second", "steps_per_second", "reported", "joined", "seen", "transport", "bytes_received", "bytes_sent", "steps_made", "steps_delivered", "weight_made", "weight_delivered", "interface", "rate")
    class ReportedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    STALLED_FIELD_NUMBER: _ClassVar[int]
    EXCHANGES_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    NORM_FIELD_NUMBER: _ClassVar[int]
    PERIOD_FIELD_NUMBER: _ClassVar[int]
    EXCHANGES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    STEPS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    REPORTED_FIELD_NUMBER: _ClassVar[int]
    JOINED_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    BYTES_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    BYTES_SENT_FIELD_NUMBER: _ClassVar[int]
    STEPS_MADE_FIELD_NUMBER: _ClassVar[int]
    STEPS_DELIVERED_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_MADE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_DELIVERED_FIELD_NUMBER: _ClassVar[int]
    INTERFACE_FIELD_NUMBER: _ClassVar[int]
    RATE_FIELD_NUMBER: _ClassVar[int]
    name: str
    connected: bool
    waits: bool
    stalled: float
    exchanges: int
    dropped: int
    rejected: int
    staleness: int
    norm: float
    period: int
    exchanges_per_second: float
    steps_per_second: float
    reported: _containers.ScalarMap[str, float]
    joined: float
    seen: float
    transport: str
    bytes_received: int
    bytes_sent: int
    steps_made: int
    steps_delivered: int
    weight_made: float
    weight_delivered: float
    interface: str
    rate: float
    def __init__(self, name: _Optional[str] = ..., connected: bool = ..., waits: bool = ..., stalled: _Optional[float] = ..., exchanges: _Optional[int] = ..., dropped: _Optional[int] = ..., rejected: _Optional[int] = ..., staleness: _Optional[int] = ..., norm: _Optional[float] = ..., period: _Optional[int] = ..., exchanges_per_second: _Optional[float] = ..., steps_per_second: _Optional[float] = ..., reported: _Optional[_Mapping[str, float]] = ..., joined: _Optional[float] = ..., seen: _Optional[float] = ..., transport: _Optional[str] = ..., bytes_received: _Optional[int] = ..., bytes_sent: _Optional[int] = ..., steps_made: _Optional[int] = ..., steps_delivered: _Optional[int] = ..., weight_made: _Optional[float] = ..., weight_delivered: _Optional[float] = ..., interface: _Optional[str] = ..., rate: _Optional[float] = ...) -> None: ...

class Notice(_message.Message):
    __slots__ = ("check", "worker", "text", "remedy")
    CHECK_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    REMEDY_FIELD_NUMBER: _ClassVar[int]
    check: str
    worker: str
    text: str
    remedy: str
    def __init__(self, check: _Optional[str] = ..., worker: _Optional[str] = ..., text: _Optional[str] = ..., remedy: _Optional[str] = ...) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("version", "center", "rule", "mode", "uptime", "parameters", "parameter_bytes", "workers", "bytes_received", "bytes_sent", "rejected", "degraded", "listens_at", "direct_address", "page_address", "notices", "steps_made", "steps_delivered", "weight_made", "weight_delivered")
    class RejectedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CENTER_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    UPTIME_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    PARAMETER_BYTES_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    BYTES_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    BYTES_SENT_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    DEGRADED_FIELD_NUMBER: _ClassVar[int]
    LISTENS_AT_FIELD_NUMBER: _ClassVar[int]
    DIRECT_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PAGE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NOTICES_FIELD_NUMBER: _ClassVar[int]
    STEPS_MADE_FIELD_NUMBER: _ClassVar[int]
    STEPS_DELIVERED_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_MADE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_DELIVERED_FIELD_NUMBER: _ClassVar[int]
    version: int
    center: str
    rule: str
    mode: str
    uptime: float
    parameters: int
    parameter_bytes: int
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    bytes_received: int
    bytes_sent: int
    rejected: _containers.ScalarMap[str, int]
    degraded: str
    listens_at: str
    direct_address: str
    page_address: str
    notices: _containers.RepeatedCompositeFieldContainer[Notice]
    steps_made: int
    steps_delivered: int
    weight_made: float
    weight_delivered: float
    def __init__(self, version: _Optional[int] = ..., center: _Optional[str] = ..., rule: _Optional[str] = ..., mode: _Optional[str] = ..., uptime: _Optional[float] = ..., parameters: _Optional[int] = ..., parameter_bytes: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., bytes_received: _Optional[int] = ..., bytes_sent: _Optional[int] = ..., rejected: _Optional[_Mapping[str, int]] = ..., degraded: _Optional[str] = ..., listens_at: _Optional[str] = ..., direct_address: _Optional[str] = ..., page_address: _Optional[str] = ..., notices: _Optional[_Iterable[_Union[Notice, _Mapping]]] = ..., steps_made: _Optional[int] = ..., steps_delivered: _Optional[int] = ..., weight_made: _Optional[float] = ..., weight_delivered: _Optional[float] = ...) -> None: ...
