"""``agn-optax launch``: a center and its workers, as processes of this machine."""

from __future__ import annotations

import contextlib
import json as json_
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Annotated, Any, cast

import rich.text
import typer

from agn_optax import errors, launch, service
from agn_optax.cli import _center_options, _export, _options, _rules, _table
from agn_optax.cli._center_options import CenterOptions
from agn_optax.cli._rules import RuleOptions
from agn_optax.launch import Ended, Program
from agn_optax.service import tokens

_COLORS = ("cyan", "magenta", "green", "yellow", "blue", "red")
_CENTER = "center"
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}  # noqa: S104 not bound to


@_options.record()
class LaunchOptions:
    """Which workers, and how they are started and ended.

    Options:
      workers: How many workers to start.
      center embedded|HOST:PORT: A center of our own, or where one is.
      token_file FILE: Of --center HOST:PORT: with the workers' token.
      restarts: How often a worker that failed is started again.
      restart_delay: Seconds before it is.
      start_delay: Seconds between the starts of two workers.
      stop_grace: Seconds that workers have to end when told to, and the center after
        them.
      on_failure WHAT [stop]: Whether a worker that has failed for good is to "stop" the
        others, or these "go on".
    """

    workers: int = _options.at_least(1)
    center: str = "embedded"
    token_file: pathlib.Path | None = None
    restarts: int = _options.at_least(0, 0)
    restart_delay: float = _options.at_least(0.0, 1.0)
    start_delay: float = _options.at_least(0.0, 0.0)
    stop_grace: float = _options.at_least(0.0, 10.0)
    on_failure: str = "stop"


def launch_command(
    rule: RuleOptions,
    center: CenterOptions,
    options: LaunchOptions,
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PROGRAM.py [ARGUMENTS]...",
            help="What each worker runs, as after `python`; its own options follow it.",
        ),
    ] = None,
    module: Annotated[
        str | None,
        typer.Option(
            "-m",
            metavar="MODULE",
            help="What each worker runs instead, as after `python -m`; its own "
            "arguments follow --.",
        ),
    ] = None,
    config: _options.Config = None,
    json: _options.Json = False,
) -> None:
    """Start a center and workers around it, and end them all together.

    Workers find AGN_OPTAX_CENTER (its address), AGN_OPTAX_RANK, AGN_OPTAX_WORKERS and
    AGN_OPTAX_WORKER (their name) in their environment, and AGN_OPTAX_RULE (that of the
    center), all of which agn_optax.service.environment() reads; and AGN_OPTAX_TOKEN, by
    which the center knows that name; worker-0 may be the chief. The exit code is that
    of the worker that failed. With --json, a summary is printed to stdout, and all
    lines go to stderr.

    Example: agn-optax launch --workers 4 --rule downpour train.py --epochs 3
    """
    run = [*([] if module is None else ["-m", module]), *(command or [])]
    if not run:
        raise errors.InvalidArgumentError(
            "nothing to run: give PROGRAM.py, or -m MODULE, after the options"
        )
    own = options.center == "embedded"
    _check(rule, center, config, options)
    names = [f"worker-{rank}" for rank in range(options.workers)]
    values = _options.read(config, RuleOptions, CenterOptions)
    told = {}
    if own:  # so that nobody has to say it twice
        given = _options.given(_options.filled(rule, values))
        told = {service.RULE: json_.dumps(given)}
    served = _options.filled(center, values)
    is_closed = own and not served.open
    # One for each worker, and one for whoever watches; never on a command line.
    made = [tokens.generated() for _ in (*names, "here")] if is_closed else []
    # And one to be pasted into a browser, which lets it look, and no more.
    has_page = own and _center_options.page_address(served) is not None
    shown = tokens.generated() if is_closed and has_page else ""
    stack = contextlib.ExitStack()

    def token_of(rank: int) -> dict[str, str]:
        if made:
            return {tokens.TOKEN: made[rank]}
        if options.token_file is not None:
            return {tokens.TOKEN_FILE: str(options.token_file)}
        return {}

    def with_center(address: str) -> list[Program]:
        return [
            Program(
                name,
                [sys.executable, *run],
                {
                    "AGN_OPTAX_CENTER": address,
                    "AGN_OPTAX_RANK": str(rank),
                    "AGN_OPTAX_WORKERS": str(options.workers),
                    "AGN_OPTAX_WORKER": name,
                    "AGN_OPTAX_PROCESSES": "1",
                    **told,
                    **token_of(rank),
                },
                restarts=options.restarts,
                delay=rank * options.start_delay,
            )
            for rank, name in enumerate(names)
        ]

    def when_it_serves(line: str) -> Sequence[Program]:
        said = _serving(line)
        if not said:
            return ()
        address = _reached_at(said)
        if made:
            with contextlib.suppress(OSError):  # then nobody else has one
                stack.enter_context(tokens.left_here(address, made[-1]))
        return with_center(address)

    programs = with_center(options.center)
    if own:
        serve = [sys.executable, "-m", "agn_optax.cli", "serve", "--json"]
        serve += [] if config is None else [f"--config={config}"]
        serve += _options.arguments(rule) + _options.arguments(center)
        programs = [
            Program(
                _CENTER,
                serve,
                {tokens.TOKENS: _lines(names, made, shown)} if made else {},
                waited_for=False,
                followers=when_it_serves,
            )
        ]
    begin = time.monotonic()
    try:
        with stack:
            ended = launch.run(
                programs,
                output=_Output([_CENTER, *names], json, shown),
                grace=options.stop_grace,
                restart_delay=options.restart_delay,
                on_failure=cast(Any, options.on_failure),  # it is checked
            )
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    code = _exit_code(ended)
    if own and len(ended) == 1:
        code = code or 1
        typer.echo("agn-optax: the center ended before it served", err=True)
    if json:
        _options.print_json(
            {
                "returncode": code,
                "seconds": time.monotonic() - begin,
                "programs": [vars(each) for each in ended],
            }
        )
    if code:
        raise typer.Exit(code)


def _lines(names: Sequence[str], made: Sequence[str], shown: str) -> str:
    """Who may call the center: each worker, this user's programs, and a browser."""
    roles = ["chief", *["worker"] * (len(names) - 1)]
    lines = [*zip(roles, names, made, strict=False), ("chief,operator", "*", made[-1])]
    lines += [("observer", "*", shown)] if shown else []
    return "\n".join(" ".join(line) for line in lines)


def _check(
    rule: RuleOptions, center: CenterOptions, config: Any, options: LaunchOptions
) -> None:
    where = options.center
    if where == "embedded":
        why = "is for --center HOST:PORT; of an embedded one every worker has its own"
        _options.refuse(options, why, only=("token_file",))
    else:
        for each in where.split(","):
            service.check_reachable(each.strip())
        why = f"is for an embedded center, and --center is {where}"
        if config is not None:
            raise errors.InvalidArgumentError(f"--config {why}")
        _options.refuse(rule, why)
        _options.refuse(center, why)
        return
    values = _options.read(config, RuleOptions, CenterOptions)
    rule = _options.filled(rule, values)
    if not _rules.is_given(rule):
        raise errors.InvalidArgumentError(
            "the embedded center has no rule: give --rule NAME or --rule-from "
            "MODULE:OBJECT, on the command line or in a file with --config, as for "
            "`agn-optax serve`; or give --center HOST:PORT"
        )
    # What is wrong is better said before anything is started.
    if rule.rule_from is None:
        _rules.make(rule)
    center = _options.filled(center, values)
    _center_options.settings(center)
    if center.save is not None:
        _export.check(center.save)
    _center_options.access(center, tokens.generated())


def _serving(line: str) -> dict[str, Any]:
    """What `serve --json` prints once it serves, if a line is that."""
    try:
        said = json_.loads(line)
    except ValueError:
        return {}
    is_that = isinstance(said, dict) and said.get("event") == "serving"
    return said if is_that else {}


def _reached_at(said: dict[str, Any]) -> str:
    """Where this machine's workers find a center that has ``said`` that it serves."""
    # One that listens everywhere is reached on this machine, where plain text may be.
    host, _, port = str(said["address"]).rpartition(":")
    return f"{_LOOPBACK.get(host, host)}:{port}"


def _exit_code(ended: Sequence[Ended]) -> int:
    """As a shell has it, of the first program at fault."""
    for each in ended:
        if each.returncode and not each.stopped:
            return each.returncode if each.returncode > 0 else 128 - each.returncode
    return 0


class _Output:
    """Lines of several programs, each behind its program's name."""

    def __init__(self, names: Sequence[str], stderr: bool, shown: str = "") -> None:
        self._shown = shown  # the token of the page
        self._console = _table.console(stderr=stderr)
        self._width = max(map(len, names))
        self._styles = {name: _COLORS[i % len(_COLORS)] for i, name in enumerate(names)}

    def __call__(self, name: str, line: str) -> None:
        if name == _CENTER and (said := _serving(line)):
            line = f"serving at {_reached_at(said)}"  # to a person, and not to us
            page = said.get("page")
            line += f", page at {page}" if page else ""
            line += f" with token {self._shown}" if page and self._shown else ""
        prefix = (f"{name:<{self._width}} | ", self._styles[name])
        # A program's own colors are kept on a terminal, and only there.
        text = rich.text.Text.assemble(prefix, rich.text.Text.from_ansi(line))
        self._console.print(text, soft_wrap=True)
