"""The wire format: arrays round-trip bit for bit, and bad input is rejected."""

import ast
import inspect
import math
import sys
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agn_optax import errors
from agn_optax.service import center_pb2 as pb
from agn_optax.service.transports._grpc import MESSAGE_SIZE, JoinedMessages
from agn_optax.service.wire import _buffers, _casting, _frames, _schema
from agn_optax.service.wire._buffers import Buffers
from agn_optax.service.wire._frames import SIZES, Frame, FrameReader, join_pieces
from agn_optax.service.wire._schema import Leaf, Schema, allocate

FLOATS = ["float64", "float32", "float16", "bfloat16"]
INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
DTYPES = [*FLOATS, *INTEGERS, "bool"]
LAYOUTS = ["C", "F", "strided", "reversed", "read-only"]


def array(dtype, shape, layout="C", seed=0):
    """Return an array of random bits, NaN included, in the given memory layout."""
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


def assert_same_bits(received, sent):
    assert len(received) == len(sent)
    for one, other in zip(received, sent, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.tobytes() == other.tobytes()


def test_numpy_knows_bfloat16_by_name():
    assert np.dtype("bfloat16") == ml_dtypes.bfloat16


def read(messages):
    """Return a reader of bytes that arrive in pieces."""
    return FrameReader(JoinedMessages(iter(messages)), Buffers())


def received(schema, messages):
    """Return the arrays of the only frame in ``messages``."""
    reader = read(messages)
    assert reader.read_header() == HEADER
    views = schema.views(reader.read_buffer(schema, "a tree"))
    assert reader.read_header() is None
    return views


HEADER = pb.Header(snapshot=pb.Snapshot(version=7))


@given(leaves(), st.integers(1, 200) | st.just(MESSAGE_SIZE))
@example([array("float32", (4,))], 1)
@example([array("float32", (4,)), array("float32", (0, 3))], 64)
@example([array("int8", ()), array("bool", ()), array("bfloat16", (2, 3), "F")], 7)
def test_arrays_round_trip_bit_for_bit(sent, size):
    schema = schema_of(sent)
    messages = list(join_pieces(Frame(HEADER, schema, sent).pieces(), size))
    length = SIZES.size + len(HEADER.SerializeToString()) + schema.size
    assert sum(map(len, messages)) == length
    assert all(len(message) == size for message in messages[:-1])
    assert 0 < len(messages[-1]) <= size
    views = received(schema, messages)
    assert_same_bits(views, sent)
    for made in views:  # aligned, so that XLA takes them without a copy
        assert made.flags.c_contiguous
        assert not made.size or made.ctypes.data % 64 == 0


def test_many_leaves_round_trip():
    sent = [array("float16", (i % 5,), seed=i) for i in range(2000)]
    schema = schema_of(sent)
    messages = join_pieces(Frame(HEADER, schema, sent).pieces(), 1000)
    assert_same_bits(received(schema, messages), sent)


def test_tree_without_leaves_round_trips():
    schema = Schema([])
    assert schema.size == 0
    assert received(schema, Frame(HEADER, schema, []).pieces()) == []


def test_pieces_are_views_of_the_arrays():
    sent = [array("float32", (700, 900)), array("int8", (3,)), array("float64", (9, 9))]
    schema = schema_of(sent)
    copied = 0
    for piece in Frame(HEADER, schema, sent).pieces():
        if any(np.shares_memory(np.frombuffer(piece, np.uint8), a) for a in sent):
            assert isinstance(piece, memoryview)
        else:
            copied += len(piece)
    head = SIZES.size + len(HEADER.SerializeToString())
    between = schema.size - sum(a.nbytes for a in sent)
    assert copied == head + between < head + 64 * len(sent)


@pytest.mark.parametrize("size", [0, 1, 5000])
def test_last_byte_of_a_frame_waits_for_its_callback(size):
    """The bytes before it are sent meanwhile."""
    sent = [array("int8", (size,))]
    schema, gone, seen = schema_of(sent), 0, []
    frame = Frame(HEADER, schema, sent, lambda: seen.append(gone))
    for piece in frame.pieces():
        assert len(piece)
        gone += len(piece)
    assert seen == [gone - 1]


def test_released_frame_holds_no_arrays():
    sent = [array("int8", (5,))]
    with Frame(HEADER, schema_of(sent), sent) as frame:
        assert frame.nbytes == 5
    assert not frame.arrays


def test_leaves_are_aligned_views_of_the_buffer():
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
def test_arrays_of_another_schema_are_rejected(wrong):
    schema = schema_of([array("float32", (2,))])
    with pytest.raises(ValueError):
        list(schema.pieces(wrong))


@pytest.mark.parametrize("sent", [*FLOATS, ">f4"])
@pytest.mark.parametrize("wire", FLOATS)
def test_numbers_are_cast_as_they_are_copied(wire, sent):
    sizes = [(3,), (2, _casting._CAST_NUMBERS + 5), ()]
    arrays = [
        np.random.default_rng(0).normal(0, 1e3, size).astype(sent) for size in sizes
    ]
    arrays[0] = np.array([np.nan, np.inf, 3e38], sent if sent != "float16" else "f8")
    schema = Schema([Leaf(str(i), wire, a.shape) for i, a in enumerate(arrays)])
    with np.errstate(over="ignore"):
        expected = [a.astype(wire) for a in arrays]
    there = allocate(schema.size)
    there[:] = 0
    _schema.assign(schema.copies(arrays, there))
    assert_same_bits(schema.views(there), expected)
    for cast in (_schema.in_dtype, _casting.pieces):
        there[:] = np.frombuffer(b"".join(schema.pieces(arrays, cast)), np.uint8)
        assert_same_bits(schema.views(there), expected)


# Frames.

HEADERS = [
    pb.Header(),
    pb.Header(join=pb.Join(protocol=1, worker="anna" * 100, session_id="1")),
    pb.Header(message=pb.Message(sequence=2**64 - 1, schema_hash=b"\x78" * 16)),
    pb.Header(acknowledge=0),
    pb.Header(acknowledge=2**63),
    pb.Header(start=pb.Start(schema_hash=b"\x78" * 16, schema_size=2**40)),
    pb.Header(parameters=pb.Parameters()),
    pb.Header(joined=pb.Joined(center="a")),
    pb.Header(snapshot=pb.Snapshot(version=1, norm=0.0)),
    pb.Header(waiting=pb.Waiting()),
]
TREE = Schema([Leaf("x", "int8", (9,))])


def frame_bytes(header, tree=None):
    schema, arrays = (None, []) if tree is None else (TREE, [tree])
    return b"".join(Frame(header, schema, arrays).pieces())


@given(st.lists(st.tuples(st.sampled_from(HEADERS), st.booleans())), st.integers(1, 99))
def test_frames_are_read_one_after_the_other(sent_frames, size):
    tree = array("int8", (9,))
    whole = b"".join(
        frame_bytes(header, tree if has else None) for header, has in sent_frames
    )
    reader = read(whole[at : at + size] for at in range(0, len(whole), size))
    for header, has in sent_frames:
        assert reader.read_header() == header
        if has:
            assert_same_bits(TREE.views(reader.read_buffer(TREE, "a tree")), [tree])
    assert reader.read_header() is None


@pytest.mark.parametrize("size", [7, 1 << 20])
def test_leaves_are_read_into_regions_of_larger_arrays(size):
    sent = [array("int8", (3, 4)), np.float32(5), array("float16", (300,), seed=1)]
    sent[2][:] = np.arange(300)
    schema = schema_of(sent)
    whole = b"".join(Frame(HEADERS[0], schema, sent).pieces())
    reader = read(whole[at : at + size] for at in range(0, len(whole), size))
    reader.read_header()
    large = [np.zeros((5, 9), np.int8), np.zeros(2, np.float32), np.zeros(400)]
    places = [large[0][1:4, 2:6], large[1][1, ...], large[2][50:350]]  # the last in f8
    reader.read_into(schema, places, "a tree")
    for place, leaf, array_ in zip(places, sent, large, strict=True):
        np.testing.assert_array_equal(place, leaf)
        assert np.count_nonzero(array_) == np.count_nonzero(leaf)
    assert reader.read_header() is None


@pytest.mark.parametrize("shape", [(8, 1 << 20), (1, 2, 1 << 21)])
def test_large_regions_are_received_in_little_memory(shape):
    """Columns of a larger array are not received in a buffer of their size."""
    whole = np.zeros((*shape[:-1], 2 * shape[-1]), np.float32)
    place = whole[..., : shape[-1]]
    sent = np.arange(place.size, dtype=np.float32).reshape(shape)
    schema = Schema([Leaf("x", "float32", shape)])
    frame = b"".join(Frame(HEADERS[0], schema, [sent]).pieces())
    reader = read(frame[at : at + (1 << 20)] for at in range(0, len(frame), 1 << 20))
    reader.read_header()
    tracemalloc.start()
    try:
        reader.read_into(schema, [place], "a tree")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    np.testing.assert_array_equal(place, sent)
    assert not whole[..., shape[-1] :].any()
    assert peak < sent.nbytes / 4


def test_array_of_another_size_is_not_read_into():
    reader = read([frame_bytes(HEADERS[0], array("int8", (9,)))])
    reader.read_header()
    place = np.zeros(8, np.int8)
    with pytest.raises(errors.ProtocolError, match="of 8 bytes was expected, got 9"):
        reader.read_into(Schema([Leaf("x", "int8", (8,))]), [place], "a tree")
    assert not place.any()


@pytest.mark.parametrize("columns", [slice(0, 4), slice(3, 7)])
def test_two_threads_copy_to_and_from_columns_of_arrays(monkeypatch, columns):
    monkeypatch.setattr(_buffers, "_MIN_FOR_TWO_THREADS", 0)
    source, packed = array("int8", (6, 8)), np.zeros((6, 4), np.int8)
    destination = np.zeros((6, 8), np.int8)
    _buffers.copy([(packed, source[:, columns])], packed.nbytes)
    _buffers.copy([(destination[:, columns], packed)], packed.nbytes)
    expected = np.zeros_like(source)
    expected[:, columns] = source[:, columns]
    np.testing.assert_array_equal(destination, expected)


def everything(messages):
    """Return all frames in arbitrary bytes, and how reading ended."""
    reader = read(messages)
    frames = []
    try:
        while (header := reader.read_header()) is not None:
            frames.append(header)
            if header.HasField("snapshot"):
                reader.read_buffer(TREE, "a tree")
    except errors.ProtocolError:
        return frames, "rejected"
    except EOFError:
        return frames, "cut"
    return frames, "ended"


@given(st.lists(st.binary(max_size=60), max_size=3))
@example([b""])
@example([b"\xff" * 30])
@example([SIZES.pack(0, 0), SIZES.pack(0, 1)])
@example([SIZES.pack(2**32 - 1, 0)])
@example([SIZES.pack(3, 2**64 - 1), b"abc"])
def test_random_bytes_are_read_or_rejected(messages):
    everything(messages)


@given(
    st.lists(st.sampled_from(HEADERS), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=3),
)
def test_corrupted_frames_are_read_or_rejected(headers, changes):
    spoiled = bytearray(b"".join(frame_bytes(header) for header in headers))
    for at, byte in changes:
        spoiled[at % len(spoiled)] = byte
    everything([bytes(spoiled)])


@pytest.mark.parametrize("header", HEADERS, ids=lambda c: c.WhichOneof("content"))
def test_truncated_frames_are_detected(header):
    tree = array("int8", (9,))
    has = header.HasField("snapshot")
    whole = frame_bytes(header, tree if has else None)
    for end in range(1, len(whole)):
        frames, how = everything([whole[:end]])
        assert how == "cut"
        assert not frames or (has and end >= len(whole) - 9)
    assert everything([whole, whole]) == ([header, header], "ended")


@pytest.mark.parametrize(
    ("whole", "message"),
    [
        (
            SIZES.pack(_frames.MAX_HEADER + 1, 0),
            "at most 65536 bytes, got 65537",
        ),
        (
            SIZES.pack(2**32 - 1, 0) + bytes(9),
            "at most 65536 bytes, got 4294967295",
        ),
        (SIZES.pack(9, 0) + b"\xff" * 9, "not a header"),
        (SIZES.pack(0, 8) + bytes(8), "of 9 bytes was expected, got 8 bytes"),
        (SIZES.pack(0, 2**64 - 1), "of 9 bytes was expected, got 18446744073709551615"),
        (SIZES.pack(0, 0), "of 9 bytes was expected, got 0 bytes"),
    ],
)
def test_bad_sizes_are_rejected_before_memory_is_allocated(whole, message):
    class Never(Buffers):
        def take(self, size):
            raise AssertionError

    def read_it():
        reader = FrameReader(JoinedMessages(iter([whole])), Never())
        reader.read_header()
        reader.read_buffer(TREE, "a tree")

    with pytest.raises(errors.ProtocolError, match=message):
        read_it()


def test_unexpected_buffer_is_rejected():
    reader = read([frame_bytes(pb.Header(acknowledge=1), array("int8", (9,)))])
    assert reader.read_header().acknowledge == 1
    with pytest.raises(errors.ProtocolError, match="a buffer of 9 bytes came"):
        reader.read_header()


# Schemas.

A = Leaf("['a']", "float32", (2, 3))
B = Leaf("['b']", "int32", ())


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (A._replace(dtype="complex64"), r"leaf \['a'\] has dtype 'complex64'"),
        (A._replace(dtype="object"), "'object', which cannot be sent"),
        (A._replace(dtype=">f4"), "'>f4', which cannot be sent"),
        (A._replace(dtype=""), "'', which cannot be sent"),
        (A._replace(shape=(2, -1)), r"leaf \['a'\] has shape \[2, -1\]"),
        (A._replace(shape=(2**63,)), r"has shape \[9223372036854775808\]"),
        (A._replace(shape=(2**40, 2**40)), "has shape"),
        (A._replace(shape=(0, 2**64 - 1)), "has shape"),
        (A._replace(shape=(1,) * 65), "has shape"),
        (B, r"leaf \['b'\] occurs twice"),
    ],
)
def test_bad_leaves_are_rejected(leaf, message):
    with pytest.raises(errors.ProtocolError, match=message):
        Schema([B, leaf])


def test_schema_larger_than_any_memory_is_rejected():
    huge = [Leaf(str(i), "float64", (2**58,)) for i in range(4)]
    assert Schema(huge[:3]).size == 3 * 2**61
    with pytest.raises(errors.ProtocolError, match=f"no buffer has {2**63} bytes"):
        Schema(huge)


@given(
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 2) | st.integers(0, 2**64 - 1), max_size=70),
)
def test_any_shape_is_viewed_or_rejected(dtype, shape):
    try:
        schema = Schema([Leaf("x", dtype, tuple(shape))])
    except errors.ProtocolError:
        return
    assert schema.size < sys.maxsize
    if schema.size < 10_000:
        (view,) = schema.views(allocate(schema.size))
        assert (view.dtype.name, view.shape) == (dtype, tuple(shape))


def test_cast_changes_floating_leaves_only():
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
def test_cast_to_other_dtypes_is_rejected(dtype):
    with pytest.raises(
        errors.ProtocolError, match=f"floats must be sent as .* got '{dtype}'"
    ):
        Schema([A]).cast(dtype)


def test_hash_depends_on_the_leaves_only():
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


def test_wire_format_imports_neither_jax_nor_grpc():
    named = set()
    for node in ast.walk(ast.parse(inspect.getsource(_schema))):
        if isinstance(node, ast.Import):
            named |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            named |= {f"{node.module}.{alias.name}" for alias in node.names}
    foreign = {n for n in named if n.split(".")[0] not in sys.stdlib_module_names}
    # These internal modules import nothing but numpy.
    own = {"agn_optax.errors"} | {
        f"agn_optax._internal.{name}" for name in ("Description", "Leaf", "layout")
    }
    assert foreign == {"ml_dtypes", "numpy"} | own
