"""``agn-optax serve``: a center as a process."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType
from typing import NamedTuple

import jax
import typer

from agn_optax import errors, launch, service
from agn_optax._internal import in_background
from agn_optax.cli import _center_options, _options, _rules
from agn_optax.cli._center_options import CenterOptions
from agn_optax.cli._rules import RuleOptions

_ENDS = (signal.SIGINT, signal.SIGTERM)


def serve(
    rule: RuleOptions,
    center: CenterOptions,
    config: _options.Config = None,
    json: _options.Json = False,
) -> None:
    """Serve a center, until SIGTERM or SIGINT drains it.

    Prints a line with its addresses as soon as workers may come. The first of them that
    starts as chief gives it its parameters, unless --journal or --snapshots names a
    directory with a center, which then goes on.

    Example: agn-optax serve --rule agn --center-optimizer adam --learning-rate 1e-3
    """
    values = _options.read(config, RuleOptions, CenterOptions)
    center = _options.filled(center, values)
    made = _rules.make(_options.filled(rule, values))
    settings = _center_options.settings(center)
    if not os.environ.get("JAX_PLATFORMS") and center.device in (None, "cpu"):
        # The workers on this machine want the accelerators' memory for themselves.
        jax.config.update("jax_platforms", "cpu")
    with _stop_signals() as signals, contextlib.ExitStack() as stack:
        settings |= _center_options.parent(center, made)
        if "parent" in settings:
            stack.callback(settings["parent"].close)
        server = stack.enter_context(service.serve(made, **settings))
        if json:
            _options.print_json(
                {
                    "event": "serving",
                    "rule": made.name,
                    "address": server.address,
                    "direct_address": server.direct_address,
                }
            )
        else:
            typer.echo(f"serving {made.name} at {server.address}")
            if server.direct_address is not None:
                typer.echo(f"direct connections at {server.direct_address}")

        closed = os.dup(signals.waker)  # which outlives the pipe that it is for

        def tell() -> None:
            server.center.core.wait_until_closed()
            with contextlib.suppress(OSError), os.fdopen(closed, "wb", 0) as pipe:
                pipe.write(b"\0")

        in_background(tell, "agn-optax closed", lasting=True)
        if signum := signals.wait():
            typer.echo(
                f"draining after {signal.Signals(signum).name}; again to end at once",
                err=True,
            )
    if server.center.core.failure:
        raise errors.DurabilityError(server.center.core.failure)


class _Signals(NamedTuple):
    """A pipe with the signals that end a service."""

    reader: int
    waker: int

    def wait(self) -> int:
        """The next signal; 0 once the center is closed for another reason."""
        while (said := os.read(self.reader, 1)[0]) not in (0, *_ENDS):
            pass  # a signal of somebody else's
        return said


@contextlib.contextmanager
def _stop_signals() -> Iterator[_Signals]:
    """Signals that end a service, the first of each kind; the next one kills."""

    def next_one_kills(signum: int, frame: FrameType | None) -> None:
        signal.signal(signum, signal.SIG_DFL)

    signals = _Signals(*os.pipe())
    os.set_blocking(signals.waker, False)
    try:
        with launch.signals_to(signals.waker, _ENDS, next_one_kills):
            yield signals
    finally:
        for end in signals:
            os.close(end)
