"""Direct connections: what travels over a plain socket instead of a gRPC call.

A greeting each way; then packets: a head, the control part of a frame, and the whole
buffer that belongs to it, if it does not lie in shared memory. See center.proto.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
from collections.abc import Callable, Iterator

from agn_optax import errors
from agn_optax.service import _address
from agn_optax.service.wire import _casting
from agn_optax.service.wire._frames import Parcel

HEAD = struct.Struct("<IQ")  # bytes of the control part, and of the buffer
GREETING = b"agn_optax direct 1\n"
KEY_SIZE = 16  # bytes
# What is smaller goes through the socket faster than through shared memory.
LEAST_SHARED = 64 << 10  # bytes
MOST_SEGMENTS = 16  # of one connection
_MOST_PIECES = 512  # of one call of sendmsg; systems take 1,024
_ENOUGH = 1 << 20  # bytes of one call
_BUFFER = 4 << 20  # bytes; more than a copy through the kernel gains from
_SILENCE = 15  # seconds after which a host that says nothing is gone, as with gRPC


def tune(end: socket.socket) -> None:
    """Settings of a socket, at either end."""
    if end.family == getattr(socket, "AF_UNIX", None):
        # Those of TCP grow by themselves, as far as the way there needs.
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            end.setsockopt(socket.SOL_SOCKET, option, _BUFFER)
        return
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", 5),
        ("TCP_KEEPALIVE", 5),  # its name on macOS
        ("TCP_KEEPINTVL", 2),
        ("TCP_KEEPCNT", 5),
        ("TCP_USER_TIMEOUT", 1000 * _SILENCE),
    ):
        with contextlib.suppress(OSError):
            if hasattr(socket, name):
                end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    with contextlib.suppress(OSError):  # the other end has gone, or reno is not allowed
        within = end.getsockname()[0] == end.getpeername()[0]
        if within and hasattr(socket, "TCP_CONGESTION"):
            # Nothing is congested within a host. BBR, say, would pace what is sent, and
            # stop for a fifth of a second every ten to measure the way.
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")


def batches(parcel: Parcel, shared: bool) -> Iterator[list[memoryview]]:
    """The bytes of a packet, as many pieces at a time as go out in one call.

    Without the buffer if that is in ``shared`` memory.
    """
    control = parcel.control.SerializeToString()
    length = 0 if shared else parcel.nbytes
    batch, size = [memoryview(HEAD.pack(len(control), length) + control)], 0
    if parcel.schema is not None and not shared:
        for piece in parcel.schema.pieces(parcel.arrays, _casting.pieces):
            if len(batch) == _MOST_PIECES or size >= _ENOUGH:
                yield batch
                batch, size = [], 0
            if len(piece):
                batch.append(piece)
                size += len(piece)
    if parcel.until is not None:
        if len(batch) > 1:
            yield batch[:-1]
        parcel.until()
        batch = batch[-1:]
    yield batch


def send(
    end: socket.socket, parcel: Parcel, shared: bool, sent: Callable[[], None]
) -> None:
    """Sends a packet; ``sent`` is called whenever some of it has gone."""
    for batch in batches(parcel, shared):
        while batch:
            batch = _after(_send_some(end, batch), batch)
            sent()


def _send_some(end: socket.socket, batch: list[memoryview]) -> int:
    # A call that blocks is woken for every little room in the socket's buffer; a poll
    # waits until there is more, and takes three quarters of the time.
    while hasattr(select, "poll"):
        try:
            return end.sendmsg(batch, [], socket.MSG_DONTWAIT)
        except BlockingIOError:
            room = select.poll()
            room.register(end, select.POLLOUT)
            room.poll()
    return end.sendmsg(batch)  # not on Linux, nor another Unix


def read(end: socket.socket, size: int) -> bytes:
    """The next bytes that come, so many of them.

    Raises:
      EOFError: nothing more comes.
    """
    heard = bytearray(size)
    fill(end, memoryview(heard))
    return bytes(heard)


def fill(
    end: socket.socket, view: memoryview, heard: Callable[[], None] = lambda: None
) -> None:
    """Reads as many bytes as go into ``view``; calls ``heard`` when some came.

    Raises:
      EOFError: nothing more comes.
    """
    while view:
        got = end.recv_into(view)
        if not got:
            raise EOFError
        view = view[got:]
        heard()


def _after(sent: int, of: list[memoryview]) -> list[memoryview]:
    """What is left of pieces whose first ``sent`` bytes are gone."""
    for i, piece in enumerate(of):
        if sent < len(piece):
            return [piece[sent:], *of[i + 1 :]]
        sent -= len(piece)
    return []


def lengths(head: bytes | bytearray | memoryview) -> tuple[int, int]:
    """Of the control part and the buffer.

    Raises:
      ProtocolError: the control part is longer than any.
    """
    control, buffer = HEAD.unpack(head)
    if control > _address.MAX_FRAME:
        raise errors.ProtocolError(f"no control part has {control} bytes")
    return control, buffer


def check_buffer(announced: int, expected: int, what: str) -> None:
    """The buffer in a packet is as long as its schema says.

    Raises:
      ProtocolError: it is not.
    """
    if announced != expected:
        raise errors.ProtocolError(
            f"{what} of {expected} bytes was expected, got one of {announced}"
        )
