"""Trees as bytes: they come back as they were, or not at all."""

import ast
import inspect
import math
import sys

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agn_optax import errors
from agn_optax.service import center_pb2 as pb
from agn_optax.service.wire import _casting, _schema
from agn_optax.service.wire._schema import (
    Assembler,
    Leaf,
    Schema,
    allocate,
    decode,
    encode,
)

FLOATS = ["float64", "float32", "float16", "bfloat16"]
INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
DTYPES = [*FLOATS, *INTEGERS, "bool"]
LAYOUTS = ["C", "F", "strided", "reversed", "read-only"]


def array(dtype, shape, layout="C", seed=0):
    """Any bits, NaN included, in memory of any order."""
    rng = np.random.default_rng(seed)
    if layout == "F":
        return array(dtype, shape[::-1], "C", seed).T
    if layout in ("strided", "reversed") and shape:
        step = 2 if layout == "strided" else -1
        wide = (shape[0] * abs(step), *shape[1:])
        return array(dtype, wide, "C", seed)[::step]
    size = math.prod(shape) * np.dtype(dtype).itemsize
    high = 2 if dtype == "bool" else 256
    made = rng.integers(0, high, size, np.uint8).view(dtype).reshape(shape)
    made.flags.writeable = layout != "read-only"
    return made


@st.composite
def leaves(draw):
    shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
    kinds = st.tuples(st.sampled_from(DTYPES), shapes, st.sampled_from(LAYOUTS))
    return [
        array(*kind, seed)
        for seed, kind in enumerate(draw(st.lists(kinds, max_size=6)))
    ]


def schema_of(arrays):
    return Schema([Leaf(f"[{i}]", a.dtype.name, a.shape) for i, a in enumerate(arrays)])


def assert_same_bits(came, sent):
    assert len(came) == len(sent)
    for one, other in zip(came, sent, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.tobytes() == other.tobytes()


def test_bfloat16_is_numpys_name():
    assert np.dtype("bfloat16") == ml_dtypes.bfloat16


@given(leaves(), st.integers(1, 200) | st.just(_schema.CHUNK_SIZE))
@example([array("float32", (4,))], 1)
@example([array("float32", (4,)), array("float32", (0, 3))], 64)
@example([array("int8", ()), array("bool", ()), array("bfloat16", (2, 3), "F")], 7)
def test_arrays_come_back_bit_for_bit(sent, size):
    schema = schema_of(sent)
    assembler = Assembler(schema)
    lengths = []
    for offset, pieces in schema.chunks(sent, size):
        _, at, chunk = decode(encode(b"", offset, pieces))
        assert not assembler.complete
        assembler.feed(at, chunk)
        lengths.append(len(chunk))
    assert assembler.complete
    assert sum(lengths) == schema.size
    assert all(length == size for length in lengths[:-1])
    assert all(0 < length <= size for length in lengths[-1:])
    came = assembler.arrays()
    assert_same_bits(came, sent)
    for made in came:  # aligned, so that XLA takes them without a copy
        assert made.flags.c_contiguous
        assert not made.size or made.ctypes.data % 64 == 0


def test_many_leaves():
    sent = [array("float16", (i % 5,), seed=i) for i in range(2000)]
    schema = schema_of(sent)
    assembler = Assembler(schema)
    for offset, pieces in schema.chunks(sent, 1000):
        assembler.feed(offset, b"".join(pieces))
    assert_same_bits(assembler.arrays(), sent)


def test_no_leaves():
    schema = Schema([])
    assert schema.size == 0
    assert list(schema.chunks([])) == []
    assembler = Assembler(schema)
    assert assembler.complete
    assembler.feed(0, memoryview(b""))
    assert assembler.arrays() == []


def test_pieces_are_views_of_the_arrays():
    sent = [array("float32", (700, 900)), array("int8", (3,)), array("float64", (9, 9))]
    schema = schema_of(sent)
    chunks = list(schema.chunks(sent))
    assert len(chunks) == 3  # of 1 MiB, of 2.5 MB
    copied = 0
    for _, pieces in chunks:
        for piece in pieces:
            if any(np.shares_memory(np.frombuffer(piece, np.uint8), a) for a in sent):
                assert isinstance(piece, memoryview)
            else:
                copied += len(piece)
    assert copied == schema.size - sum(a.nbytes for a in sent)  # between leaves
    assert copied < 64 * len(sent)


def test_a_chunk_lies_in_its_frame():
    frame = encode(b"\x18\x01", 5, [b"abc", b"", b"defg"])
    _, _, chunk = decode(frame)
    assert chunk == b"abcdefg"
    assert np.shares_memory(
        np.frombuffer(chunk, np.uint8), np.frombuffer(frame, np.uint8)
    )


def test_leaves_lie_in_the_buffer():
    schema = schema_of([array("int8", (3,)), array("float32", ()), array("bool", (0,))])
    assert schema.offsets == (0, 256, 320)
    buffer = allocate(schema.size)
    views = schema.views(buffer)
    assert all(np.shares_memory(view, buffer) for view in views[:2])
    views[1][...] = 1.0
    assert buffer[256:260].tobytes() == np.float32(1.0).tobytes()


@pytest.mark.parametrize(
    "wrong",
    [
        [],
        [array("float32", (2,)), array("float32", (2,))],
        [array("int32", (2,))],
        [array("float32", (1, 2))],
    ],
)
def test_arrays_of_another_schema(wrong):
    schema = schema_of([array("float32", (2,))])
    with pytest.raises(ValueError):
        list(schema.chunks(wrong))


@pytest.mark.parametrize("sent", [*FLOATS, ">f4"])
@pytest.mark.parametrize("wire", FLOATS)
def test_numbers_are_cast_as_they_are_copied(wire, sent):
    sizes = [(3,), (2, _casting._AT_A_TIME + 5), ()]
    arrays = [
        np.random.default_rng(0).normal(0, 1e3, size).astype(sent) for size in sizes
    ]
    arrays[0] = np.array([np.nan, np.inf, 3e38], sent if sent != "float16" else "f8")
    schema = Schema([Leaf(str(i), wire, a.shape) for i, a in enumerate(arrays)])
    with np.errstate(over="ignore"):
        expected = [a.astype(wire) for a in arrays]
    there = allocate(schema.size)
    there[:] = 0
    _schema.assign(schema.places(arrays, there))
    assert_same_bits(schema.views(there), expected)
    for size, cast in ((1000, _schema.in_dtype), (_schema.CHUNK_SIZE, _casting.pieces)):
        assembler = Assembler(schema)
        for offset, pieces in schema.chunks(arrays, size, cast):
            assembler.feed(offset, b"".join(pieces))
        assert_same_bits(assembler.arrays(), expected)


# Frames, as protobuf reads and writes them.

CONTROLS = [
    pb.Frame(),
    pb.Frame(join=pb.Join(protocol=1, worker="anna" * 100, incarnation="1")),
    pb.Frame(message=pb.Message(sequence=2**64 - 1, schema_hash=b"\x78" * 16)),
    pb.Frame(acknowledge=0),
    pb.Frame(acknowledge=2**63),
    pb.Frame(start=pb.Start(schema=pb.Schema(leaves=[pb.Leaf(path="a")] * 3))),
    pb.Frame(joined=pb.Joined(center="a")),
    pb.Frame(snapshot=pb.Snapshot(version=1, norm=0.0)),
    pb.Frame(waiting=pb.Waiting()),
]
OFFSETS = st.integers(0, 2**64 - 1) | st.integers(0, 300)


@given(st.sampled_from(CONTROLS), OFFSETS, st.lists(st.binary(max_size=200)))
def test_what_is_encoded_is_a_frame(control, offset, pieces):
    frame = encode(control.SerializeToString(), offset, pieces)
    read = pb.Frame.FromString(frame)
    assert read.WhichOneof("control") == control.WhichOneof("control")
    chunk = b"".join(pieces)
    assert (read.offset, read.chunk) == (offset if pieces else 0, chunk)
    read.ClearField("offset")
    read.ClearField("chunk")
    assert read == control
    assert decode(frame) == (control.SerializeToString(), offset * bool(pieces), chunk)


@given(st.sampled_from(CONTROLS), OFFSETS, st.binary(max_size=300))
def test_a_frame_of_protobuf_is_decoded(control, offset, chunk):
    frame = pb.Frame(offset=offset, chunk=chunk)
    frame.MergeFrom(control)
    wire = frame.SerializeToString()
    assert decode(wire) == (control.SerializeToString(), offset, chunk)


def decoded(frame):
    """What comes of a frame that may be anything, or None if it is refused."""
    try:
        control, offset, chunk = decode(frame)
    except errors.ProtocolError:
        return None
    assert frame.startswith(control)
    assert frame.endswith(bytes(chunk))
    assert len(control) + len(chunk) <= len(frame)
    assert offset >= 0
    return control, offset, bytes(chunk)


@given(st.binary(max_size=60))
@example(b"")
@example(b"\x70")
@example(b"\x7a\x00\x00")
@example(b"\xff" * 30)
def test_random_bytes_are_read_or_refused(frame):
    decoded(frame)


@given(
    st.sampled_from(CONTROLS),
    OFFSETS,
    st.binary(max_size=20),
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 255)), max_size=3),
)
def test_spoiled_frames_are_read_or_refused(control, offset, chunk, changes):
    frame = bytearray(encode(control.SerializeToString(), offset, [chunk]))
    for at, byte in changes:
        frame[at % len(frame)] = byte
    decoded(bytes(frame))


@pytest.mark.parametrize("control", CONTROLS, ids=lambda c: c.WhichOneof("control"))
def test_a_frame_that_was_cut(control):
    control = control.SerializeToString()
    frame = encode(control, 300, [b"chunk"])
    whole = {len(control), len(control) + len(b"\x70\xac\x02")}
    for end in range(len(frame)):
        came = decoded(frame[:end])
        if end in whole or not end:
            assert came == (
                frame[: min(end, len(control))],
                300 * (end > len(control)),
                b"",
            )
        else:
            assert came is None
        assert decoded(frame + bytes(end + 1)) is None


ACKNOWLEDGE, WAITING, AT_5, CHUNK = b"\x18\x01", b"\x3a\x00", b"\x70\x05", b"\x7a\x02ab"


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (b"\x80", "ends within a number"),
        (b"\x18", "ends within a number"),
        (b"\x70" + b"\xff" * 10 + b"\x01", "number in a frame is too long"),
        (b"\x0a\x05abc", "ends within a field"),
        (b"\x0a" + b"\xff" * 9 + b"\x7f", "ends within a field"),
        (b"\x7a" + b"\xff" * 9 + b"\x7f" + b"ab", "has [0-9]{20,} bytes, and 2 follow"),
        (b"\x7a\x03ab", "has 3 bytes, and 2 follow"),
        (b"\x7a\x01ab", "has 1 bytes, and 2 follow"),
        (CHUNK + AT_5, "has 2 bytes, and 4 follow"),
        (b"\x09" + bytes(8), "no field with tag 9"),
        (b"\x1d" + bytes(4), "no field with tag 29"),
        (AT_5 + AT_5 + CHUNK, "in this order; got tag 112 at byte 2"),
        (AT_5 + WAITING, "in this order; got tag 58 at byte 2"),
        (ACKNOWLEDGE + AT_5 + ACKNOWLEDGE, "in this order; got tag 24 at byte 4"),
        # Not one field after the other, for as long as a frame may be.
        (ACKNOWLEDGE * 1_000_000, "in this order; got tag 24 at byte 2"),
        (AT_5 * 1_000_000, "in this order; got tag 112 at byte 2"),
    ],
)
def test_not_a_frame(frame, message):
    with pytest.raises(errors.ProtocolError, match=message):
        decode(frame)


# Chunks.


@given(
    st.integers(0, 40),
    st.lists(st.tuples(st.sampled_from([0, 0, 0, -1, 1, 7]), st.integers(0, 20))),
)
def test_chunks_come_in_order_and_without_gaps(size, chunks):
    sent = array("uint8", (size,))
    data = sent.tobytes() + bytes(100)
    assembler = Assembler(schema_of([sent]))
    received = 0
    for shift, length in chunks:
        offset = received + shift
        chunk = data[max(0, offset) :][:length]
        if shift or received + length > size:
            with pytest.raises(errors.ProtocolError, match="was expected, got"):
                assembler.feed(offset, chunk)
        else:
            assembler.feed(offset, chunk)
            received += length
        assert assembler.received == received
        assert assembler.complete == (received == size)
    assembler.feed(received, data[received:size])  # what was refused spoiled nothing
    assert_same_bits(assembler.arrays(), [sent])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda c: [c[1]],
            "a chunk at byte 0 was expected, got one at 100",
        ),
        (lambda c: [c[0], c[2]], "a chunk at byte 100 was expected, got one at 200"),
        (lambda c: [c[0], c[0]], "a chunk at byte 100 was expected, got one at 0"),
        (lambda c: [*c, c[2]], "a chunk at byte 250 was expected, got one at 200"),
        (lambda c: [*c, (250, b"x")], "of 250 bytes was expected, got 251 or more"),
        (lambda c: [*c[:2], (200, bytes(99))], "of 250 .* got 299 or more"),
    ],
)
def test_wrong_sequences_of_chunks(change, message):
    sent = [array("int8", (250,))]
    schema = schema_of(sent)
    chunks = [(at, b"".join(pieces)) for at, pieces in schema.chunks(sent, 100)]
    assembler = Assembler(schema)
    *good, bad = change(chunks)
    for offset, chunk in good:
        assembler.feed(offset, chunk)
    with pytest.raises(errors.ProtocolError, match=message):
        assembler.feed(*bad)


# Schemas.

A = Leaf("['a']", "float32", (2, 3))
B = Leaf("['b']", "int32", ())


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (A._replace(dtype="complex64"), r"leaf \['a'\] has dtype 'complex64'"),
        (A._replace(dtype="object"), "'object', which does not travel"),
        (A._replace(dtype=">f4"), "'>f4', which does not travel"),
        (A._replace(dtype=""), "'', which does not travel"),
        (A._replace(shape=(2, -1)), r"leaf \['a'\] has shape \[2, -1\]"),
        (A._replace(shape=(2**63,)), r"has shape \[9223372036854775808\]"),
        (A._replace(shape=(2**40, 2**40)), "has shape"),
        (A._replace(shape=(0, 2**64 - 1)), "has shape"),
        (A._replace(shape=(1,) * 65), "has shape"),
        (B, r"leaf \['b'\] comes twice"),
    ],
)
def test_leaves_that_are_refused(leaf, message):
    with pytest.raises(errors.ProtocolError, match=message):
        Schema([B, leaf])


def test_a_buffer_that_no_machine_has():
    huge = [Leaf(str(i), "float64", (2**58,)) for i in range(4)]
    assert Schema(huge[:3]).size == 3 * 2**61
    with pytest.raises(errors.ProtocolError, match=f"no buffer has {2**63} bytes"):
        Schema(huge)


@given(
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 2) | st.integers(0, 2**64 - 1), max_size=70),
)
def test_any_shape_is_viewed_or_refused(dtype, shape):
    try:
        schema = Schema([Leaf("x", dtype, tuple(shape))])
    except errors.ProtocolError:
        return
    assert schema.size < sys.maxsize
    if schema.size < 10_000:
        (view,) = schema.views(allocate(schema.size))
        assert (view.dtype.name, view.shape) == (dtype, tuple(shape))


def test_cast_is_of_floating_leaves():
    leaves = [Leaf(dtype, dtype, (3,)) for dtype in DTYPES]
    schema = Schema(leaves, "structure")
    for dtype in FLOATS:
        cast = schema.cast(dtype)
        assert cast.structure == "structure"
        assert [leaf.path for leaf in cast.leaves] == DTYPES
        assert {leaf.dtype for leaf in cast.leaves[: len(FLOATS)]} == {dtype}
        assert cast.leaves[len(FLOATS) :] == schema.leaves[len(FLOATS) :]
    assert schema.cast("") is schema
    assert Schema([A, B]).cast("bfloat16").offsets == (0, 256)
    long = A._replace(shape=(70,))
    assert Schema([long, B]).offsets == (0, 512)
    assert Schema([long, B]).cast("bfloat16").offsets == (0, 256)


@pytest.mark.parametrize("dtype", ["int8", "float", "float8_e5m2", "complex64", "x"])
def test_cast_to_what_does_not_travel(dtype):
    with pytest.raises(errors.ProtocolError, match=f"wire_dtype .* got '{dtype}'"):
        Schema([A]).cast(dtype)


def test_the_hash_is_that_of_the_leaves():
    schema = Schema([A, B], "one")
    assert schema.hash == Schema((A, B), "another").hash
    assert len(schema.hash) == 16
    others = [
        [],
        [A],
        [B, A],
        [A._replace(path="['c']"), B],
        [A._replace(dtype="float16"), B],
        [A._replace(shape=(3, 2)), B],
        [A._replace(shape=(6,)), B],
    ]
    hashes = {Schema(other).hash for other in others}
    assert len(hashes) == len(others)
    assert schema.hash not in hashes


def test_the_wire_needs_neither_jax_nor_grpc():
    named = set()
    for node in ast.walk(ast.parse(inspect.getsource(_schema))):
        if isinstance(node, ast.Import):
            named |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            named |= {f"{node.module}.{alias.name}" for alias in node.names}
    foreign = {n for n in named if n.split(".")[0] not in sys.stdlib_module_names}
    # What is internal knows numpy at most.
    own = {"agn_optax.errors"} | {
        f"agn_optax._internal.{name}" for name in ("Description", "Leaf", "layout")
    }
    assert foreign == {"ml_dtypes", "numpy"} | own
