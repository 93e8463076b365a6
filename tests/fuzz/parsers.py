"""All parsers of foreign input, with samples and the errors that they may raise."""

import contextlib
import functools
import itertools
import os
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import grpc
import numpy as np
from chaos import model
from fuzz import mutate
from google.protobuf.message import DecodeError
from helpers import pieces, shared

from agn_optax import LocalCenter, errors, service
from agn_optax.center import Submission
from agn_optax.center.durability import _directory, _files, _records
from agn_optax.ops import units
from agn_optax.ops.cli import _center_options, _options, _rules
from agn_optax.ops.cli._center_options import CenterOptions
from agn_optax.ops.cli._rules import RuleOptions
from agn_optax.service import Access, Tls, _address
from agn_optax.service import center_pb2 as pb
from agn_optax.service.client._remote import Remote
from agn_optax.service.security import _token
from agn_optax.service.security._access import token_problem
from agn_optax.service.transports._connection import Connection
from agn_optax.service.transports._grpc import JoinedMessages
from agn_optax.service.wire import _errors, _frames, _pieces, _trees
from agn_optax.service.wire._buffers import Buffers
from agn_optax.service.wire._fingerprint import fingerprint
from agn_optax.service.wire._frames import Frame

RULE = shared.downpour()
TREE = {"a": np.arange(9, dtype=np.float32), "b": (np.zeros(3, np.float32), None)}
SCHEMA = _trees.schema_of(TREE)
_LEAVES = _trees.to_bytes(SCHEMA)
_SHARE = _pieces.to_bytes(pieces.random_shares(TREE, 2, np.random.default_rng(0))[0])
_SHARE = _SHARE.tobytes()
DESCRIPTION = pb.Description(
    protocol=_address.PROTOCOL,
    release="0",
    center="c" * 32,
    rule=fingerprint(RULE),
    schema_hash=SCHEMA.hash,
    lease=10.0,
    waiting_interval=2.0,
    heartbeat=3.0,
    mode="Asynchronous()",
    offers=[pb.Offer(transport="socket", address=":5000", key=bytes(16))],
)


class Parser(NamedTuple):
    """A parser to be fuzzed.

    Attributes:
      samples: valid inputs.
      read: parses bytes; raises AssertionError if the result is wrong.
      rejects: the exceptions that it may raise.
    """

    samples: list[bytes]
    read: Callable[[bytes], Any]
    rejects: tuple[type[Exception], ...]


def fuzz(parser, seed, name, count):
    """Parse ``count`` mutated inputs.

    Returns:
      The number of rejected inputs; and number, bytes and error of each input that
      raised any other exception.
    """
    rng = mutate.generator(seed, name)
    rejected, found = 0, []
    for number in range(count):
        data = mutate.mutated(rng, parser.samples)
        try:
            parser.read(data)
        except parser.rejects:
            rejected += 1
        except Exception as error:
            found.append((number, data, error))
    return rejected, found


# Messages of the wire protocol.


def _frame_bytes(header, tree=None):
    schema = None if tree is None else SCHEMA
    leaves = [] if tree is None else _trees.host_arrays(tree)
    return b"".join(Frame(header, schema, leaves).pieces())


MESSAGE = pb.Message(sequence=1, schema_hash=SCHEMA.hash, steps=3)
CLAIMS = pb.Message(sequence=2, schema_hash=SCHEMA.hash, weight=2.5, anchor_version=1)
PACKETS = [
    _frame_bytes(
        pb.Header(join=pb.Join(protocol=1, worker="anna", session_id="1" * 32))
    ),
    _frame_bytes(pb.Header(message=MESSAGE), TREE),
    _frame_bytes(pb.Header(message=CLAIMS), TREE),
    _frame_bytes(pb.Header(acknowledge=1)),
    _frame_bytes(pb.Header(start=pb.Start(protocol=1, schema_size=9)), TREE),
    _frame_bytes(pb.Header(parameters=pb.Parameters()), TREE),
    _frame_bytes(pb.Header(joined=pb.Joined(center="c" * 32))),
    _frame_bytes(pb.Header(snapshot=pb.Snapshot(version=7, norm=1.0)), TREE),
    _frame_bytes(pb.Header(waiting=pb.Waiting())),
    _frame_bytes(pb.Header(failure=pb.Failure(kind="CenterError", details="no"))),
    _frame_bytes(pb.Header(attach=pb.Segment(number=1, size=4096))),
]


def _read_frames(data):
    reader = _frames.FrameReader(JoinedMessages(iter([data[:5], data[5:]])), Buffers())
    while (header := reader.read_header()) is not None:
        if header.WhichOneof("content") in (
            "message",
            "start",
            "parameters",
            "snapshot",
        ):
            buffer = reader.read_buffer(SCHEMA, "a tree")
            assert buffer.nbytes == SCHEMA.size


def _read_share(data):
    share = _pieces.from_bytes(data)
    assert 0 <= share.process < share.processes
    assert share.like is None
    for region in (*share.owned, *share.wanted):
        assert len(region.start) == len(region.shape)


def _read_schema(data):
    schema = _trees.from_bytes(data)
    assert schema.size >= sum(leaf.nbytes for leaf in schema.leaves)
    assert len(schema.hash) == 16
    tree = _trees.build(schema, list(range(len(schema.leaves))))
    assert sorted(_leaves(tree)) == list(range(len(schema.leaves)))


def _leaves(tree):
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, list | tuple):
        return [leaf for child in tree for leaf in _leaves(child)]
    return [] if tree is None else [tree]


def _read_description(data):
    """Parse a description; the first byte is the size of the schema before it."""
    size = min(data[0], len(data) - 1) if data else 0
    description = pb.Description.FromString(data[1 + size :])
    description.schema = data[1 : 1 + size]
    Remote(Connection("127.0.0.1:1", 10.0), RULE, [])._set_description(description)


class _FailedCall(NamedTuple):
    """A failed call with the interface of gRPC."""

    metadata: Any
    status: Any
    text: Any

    def trailing_metadata(self):
        return self.metadata

    def code(self):
        return self.status

    def details(self):
        return self.text


def _read_status(data):
    """Parse the kind, the code and the details of a failed call."""
    kind, _, details = data.partition(b"|")
    codes = list(grpc.StatusCode)
    failed = _FailedCall(
        [(_errors._KIND, kind.decode(errors="replace"))],
        codes[len(data) % len(codes)],
        details.decode(errors="replace") or None,
    )
    assert isinstance(_errors.exception_of(failed, "here"), errors.AgnOptaxError)


def _read_rejected(data):
    error = _errors.exception_in(pb.Failure.FromString(data))
    assert isinstance(error, errors.AgnOptaxError)


# Contributions in the formats of all codecs, with arbitrary bits in their leaves.


@functools.cache
def _coded(name):
    """Return a center with that codec, a session, its numbers and the wire schema."""
    rule = model.rule("downpour", name)
    center = LocalCenter(rule, {"w": np.zeros(200, np.float32)})
    schema = _trees.wire_schemas(rule, center.pull().params).message
    return center, center.join("fuzz"), itertools.count(1), schema


_CODECS = list(model.CODECS)


def _read_contribution(data):
    """Exchange a contribution, and check that the center stays finite.

    The first byte selects the codec.
    """
    name = _CODECS[data[0] % len(_CODECS)] if data else "none"
    center, session, numbers, schema = _coded(name)
    # The reader of frames rejects any other size earlier.
    data = data[1:].ljust(schema.size, b"\0")
    leaves, at = [], 0
    for leaf in schema.leaves:
        flat = np.frombuffer(data[at : at + leaf.nbytes], leaf.dtype)
        leaves.append(flat.reshape(leaf.shape))
        at += leaf.nbytes
    version = center.version
    answer = session.exchange(
        Submission(next(numbers), _trees.build(schema, leaves), anchor_version=version)
    )
    assert answer.rejected or answer.version == version + 1
    assert np.all(np.isfinite(center.pull().params["w"]))


def _contributions():
    """Yield a nonzero contribution of each codec."""
    params = {"w": np.linspace(-1, 1, 200, dtype=np.float32)}
    for number, codec in enumerate(model.CODECS.values()):
        sent, _ = codec.encode(params, codec.init(params))
        leaves = [np.asarray(leaf).tobytes() for leaf in _trees.wire_leaves(sent)]
        yield bytes([number]) + b"".join(leaves)


# Text that users write.


def _read_address(data):
    address = _address.check(data.decode(errors="replace"))
    _address.is_local(address)
    _address.host(address)


def _read_environment(data):
    names = ["CENTER", "RANK", "WORKERS", "WORKER", "RESTARTS"]
    lines = data.replace(b"\0", b"").decode(errors="replace").split("\n")
    before = dict(os.environ)
    given = zip(names, lines, strict=False)  # the rest is missing
    os.environ.update({f"AGN_OPTAX_{name}": line for name, line in given})
    try:
        service.environment()
    finally:
        os.environ.clear()
        os.environ.update(before)


def _read_config(data):
    _FILE.write_bytes(data)
    values = _options.read_file(_FILE, RuleOptions, CenterOptions)
    rule = _options.with_defaults(RuleOptions(), values)
    if rule.rule_from is None:  # else a module would be imported
        _rules.make(rule)
    _center_options.settings(_options.with_defaults(CenterOptions(), values))


def _read_rate(data):
    assert units.rate(data.decode(errors="replace"), "bandwidth") > 0


def _read_tokens(data):
    access = Access(data)
    for word in data.split():
        with contextlib.suppress(errors.NotAllowedError):
            assert access.caller(word).calls


def _read_token(data):
    _FILE.write_bytes(data)
    assert not token_problem(_token._read_file(_FILE))


# Certificate and key of a worker "anna", valid until 2126, trusted nowhere.
PEM = b"""\
-----BEGIN CERTIFICATE-----
MIIBpzCCAUygAwIBAgIUZ093LnQiO5xCdzWv78+t5+NVRrAwCgYIKoZIzj0EAwIw
DTELMAkGA1UEAwwCY2EwIBcNMjYxMTIzMDU1MzUxWhgPMjEyNjEwMzAwNTU4NTFa
MCAxDTALBgNVBAMMBGFubmExDzANBgNVBAsMBndvcmtlcjBZMBMGByqGSM49AgEG
CCqGSM49AwEHA0IABCI7eWMKjLbGQWkcntZSt3XSZW2LbykbZSIaVUhMadDOz4DV
Tp/KSOHWLMDvs0JgyZXWXiWxPFDpb2ifCtocyFOjdTBzMAwGA1UdEwEB/wQCMAAw
HQYDVR0OBBYEFN8LNGYtlBu3ylgE/6j4ibgkfW5MMA4GA1UdDwEB/wQEAwIHgDAf
BgNVHSMEGDAWgBRan8NYsqDA5Ua1A60t73hFOVL/uDATBgNVHSUEDDAKBggrBgEF
BQcDAjAKBggqhkjOPQQDAgNJADBGAiEAprVKV7E/DSoKNNeSwzWVF0B22XxbnOX0
DeFaXfwh1UMCIQCQG1L3W4Di/OlTPpah0VHF6xofU4+WHDyqySnxv6dG7g==
-----END CERTIFICATE-----
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgJ3hQQVdLFSrD8yMr
g44ZQ5qaL1Yxcp9fGUHlf90ek+ehRANCAAQiO3ljCoy2xkFpHJ7WUrd10mVti28p
G2UiGlVITGnQzs+A1U6fykjh1izA77NCYMmV1l4lsTxQ6W9onwraHMhT
-----END PRIVATE KEY-----
"""


def _read_pem(data):
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        for tls in (Tls(file.name), Tls(None, file.name, file.name)):
            tls.context(serves=tls.key is not None)
            tls.client_credentials()


# Files of a center on disk.


def _records_of(count):
    pieces, on_disk, parent = [], 0, bytes(16)
    for number in range(count):
        about = {"ledger": {"w": number}, "registered": 1, "messages": []}
        contents = [[TREE["a"] + number]]
        made = _records.encode(number, about, contents, parent, on_disk, 1 << 14)
        pieces += made.pieces
        on_disk, parent = on_disk + made.size, made.digest
    return b"".join(pieces)


_COUNT = 4
_JOURNAL = _records_of(_COUNT)
_SNAPSHOT_RECORD = _records.encode(0, {"version": 0}, [[TREE["a"]]], bytes(16))
_SNAPSHOT = b"".join(_SNAPSHOT_RECORD.pieces)


def _check_record(record):
    """Check that a record is unchanged."""
    assert record.about["ledger"] == {"w": record.number}
    np.testing.assert_array_equal(record.arrays[0], TREE["a"] + record.number)


def _read_record(data):
    with _open(data) as file:
        record = _records.read(file, 0, len(data))
        if record is not None and "ledger" in record.about:
            _check_record(record)


def _read_journal(data):
    with _open(data) as file:
        for number, record in enumerate(_records.read_all(file, 0, lambda size: None)):
            assert record.number == number
            _check_record(record)


def _read_lock(data):
    (_FOLDER / "lock").write_bytes(data)
    lock = _files.read_lock(_FOLDER / "lock")
    known = [("journal", _COUNT), ("closed", 12)]
    assert lock is None or lock[:2] in known


def _line(kind, number):
    return _files.Lock(kind, number).to_bytes()


def _read_folder(data):
    """Load a directory with one mutated file: a prefix of the journal, or an error.

    The first byte selects the file.
    """
    which, data = data[:1], data[1:]
    files = {b"j": "journal-000000000000", b"s": "snapshot-000000000000", b"l": "lock"}
    for name, kept in (
        ("journal-000000000000", _JOURNAL.ljust(1 << 14, b"\0")),
        ("snapshot-000000000000", _SNAPSHOT),
        ("lock", _line("journal", _COUNT)),
    ):
        (_FOLDER / name).write_bytes(data if files.get(which) == name else kept)
    directory = _directory.Directory(_FOLDER)
    try:
        snapshot = directory.load()
        np.testing.assert_array_equal(snapshot.arrays[0], TREE["a"])
        count = 0
        for record in directory.replay(snapshot):
            assert record.number == count
            _check_record(record)
            count += 1
        assert count == _COUNT or directory.new_id_reason
    finally:
        directory.close()


@contextlib.contextmanager
def _open(data):
    file = os.memfd_create("fuzz") if hasattr(os, "memfd_create") else _temporary()
    try:
        os.write(file, data)
        yield file
    finally:
        os.close(file)


def _temporary():
    return os.open(_FILE, os.O_RDWR | os.O_CREAT | os.O_TRUNC)


_OWN = tempfile.TemporaryDirectory(prefix="agn-optax-fuzz-")
_FOLDER = pathlib.Path(_OWN.name) / "kept"
_FILE = pathlib.Path(_OWN.name) / "file"
_FOLDER.mkdir()

CONFIG = b"""
rule = "agn"
center-optimizer = "adam"
learning-rate = 1e-3
mode = "synchronous"
quorum = 2
grace = 0.5
address = "127.0.0.1:5000"
barrier = 2
journal = "kept"
"""
OTHER = b"""
rule = "easgd"
moving-rate = 0.25
mode = "bounded"
max-versions-behind = 3
lease = 2
dtype = "float32"
direct = false
journal = "kept"
journal-size = 20
insecure = true
"""
_WIRE = (errors.ProtocolError, DecodeError)
_USER = (errors.InvalidArgumentError,)
_DISK = (errors.DurabilityError, _records.DamagedError)

PARSERS = {
    "frames": Parser(
        [*PACKETS, b"".join(PACKETS[:3]), b"".join(PACKETS)],
        _read_frames,
        (errors.ProtocolError, EOFError),
    ),
    "schema": Parser([_LEAVES], _read_schema, (errors.ProtocolError,)),
    "share": Parser([_SHARE], _read_share, (errors.ProtocolError,)),
    "description": Parser(
        [bytes([len(_LEAVES)]) + _LEAVES + DESCRIPTION.SerializeToString()],
        _read_description,
        (*_WIRE, *_USER, errors.RuleMismatchError, errors.TreeMismatchError),
    ),
    "rejected": Parser(
        [pb.Failure(kind="NameTakenError", details="a").SerializeToString()],
        _read_rejected,
        (DecodeError,),
    ),
    "contribution": Parser(list(_contributions()), _read_contribution, ()),
    "status": Parser([b"NameTakenError|details", b"|", b"x|y"], _read_status, ()),
    "address": Parser(
        [b"127.0.0.1:5000", b"[::1]:80", b"unix:/tmp/center", b"host.example:0"],
        _read_address,
        _USER,
    ),
    "environment": Parser(
        [b"127.0.0.1:5000\n1\n2\nworker-1\n0"], _read_environment, _USER
    ),
    "config": Parser([CONFIG, OTHER], _read_config, _USER),
    "tokens": Parser(
        [
            b"# all\n\nchief,operator  anna  0123456789abcdef  # hers\n",
            b"worker anna 0123456789abcdef\nworker anna fedcba9876543210\nreader * "
            + 32 * b"a",
        ],
        _read_tokens,
        _USER,
    ),
    "token": Parser([b"0123456789abcdef\n", 64 * b"f"], _read_token, _USER),
    "pem": Parser([PEM], _read_pem, _USER),
    "rate": Parser([b"1Gbit", b"1.5 GB/s", b"1KiB"], _read_rate, _USER),
    "record": Parser([_SNAPSHOT, _JOURNAL], _read_record, _DISK),
    "journal": Parser([_JOURNAL, _JOURNAL.ljust(1 << 14, b"\0")], _read_journal, _DISK),
    "lock": Parser(
        [_line("journal", _COUNT), _line("closed", 12)],
        _read_lock,
        (errors.DurabilityError,),
    ),
    "folder": Parser(
        [
            b"j" + _JOURNAL.ljust(1 << 14, b"\0"),
            b"s" + _SNAPSHOT,
            b"l" + _line("journal", _COUNT),
        ],
        _read_folder,
        _DISK,
    ),
}
