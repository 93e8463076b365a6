"""``agn-optax serve``: choice of rule, settings, and shutdown."""

import contextlib
import dataclasses
import errno
import inspect
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading

import jax.numpy as jnp
import optax
import pytest
from helpers import certificates, ports, sessions, tuning
from helpers.commands import PATIENCE, command, fails, python, serve

import agn_optax
from agn_optax import codecs, errors, rules, service
from agn_optax.center import (
    Asynchronous,
    BoundedStaleness,
    Journal,
    MessageLimits,
    Submission,
    Synchronous,
    Thresholds,
)
from agn_optax.service import fingerprint


@pytest.fixture
def address(unix_address):
    return unix_address


def arguments_of(options):
    """Return options by name as arguments of the command."""
    words = []
    for name, value in options.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        else:
            words.append(f"--{option}={value}")
    return words


class Served(Exception):  # noqa: N818 no error: the end of a test's command
    """A rule, and the settings with which it would be served."""


@pytest.fixture
def served(monkeypatch):
    """A function that returns the rule and the settings of a center that options make.

    The center itself is not made.
    """

    def serve(rule, **settings):
        raise Served(rule, settings)

    def served(**options):
        result = command("serve", "--open", *arguments_of(options))
        assert isinstance(result.exception, Served), result.output
        return result.exception.args

    monkeypatch.setattr(service, "serve", serve)
    return served


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"rule": "downpour"}, rules.downpour()),
        ({"rule": "easgd", "moving_rate": 0.3, "rho": 0.5}, rules.easgd(0.3, rho=0.5)),
        ({"rule": "diloco"}, rules.diloco()),
        (
            {"rule": "diloco", "codec": "int4", "answers": "float16"},
            rules.diloco(
                codec=codecs.two_way(
                    codecs.error_feedback(codecs.quantize(4)), "float16"
                )
            ),
        ),
        (
            {"rule": "downpour", "answers": "bfloat16"},
            rules.downpour(codec=codecs.two_way(codecs.identity(), "bfloat16")),
        ),
        (
            {"rule": "diloco", "center_optimizer": "sgd", "learning_rate": 0.5},
            rules.diloco(optax.sgd(0.5)),
        ),
        (
            {
                "rule": "agn",
                "center_optimizer": "adamw",
                "learning_rate": 0.1,
                "b1": 0.8,
                "weight_decay": 0.2,
            },
            rules.agn(optax.adamw(0.1, b1=0.8, weight_decay=0.2)),
        ),
        (
            {
                "rule": "agn",
                "center_optimizer": "rmsprop",
                "learning_rate": 0.1,
                "decay": 0.5,
                "momentum": 0.9,
                "nesterov": True,
            },
            rules.agn(optax.rmsprop(0.1, decay=0.5, momentum=0.9, nesterov=True)),
        ),
    ],
)
def test_rule_is_made_by_name(options, rule, served):
    made, _ = served(**options)
    fingerprint.compare(fingerprint.fingerprint(made), rule, "here")


@pytest.mark.few(3)
@pytest.mark.parametrize("name", rules.CENTER_OPTIMIZERS)
def test_center_optimizers_accept_their_options(name, served):
    parameters = inspect.signature(rules.CENTER_OPTIMIZERS[name]).parameters
    others = {"nesterov": True, "delay": 2, "messages": 2}
    values = {option: others.get(option, 0.5) for option in parameters}
    chosen = {"rule": "agn", "center_optimizer": name}
    needed = [n for n, each in parameters.items() if each.default is each.empty]
    every = {**chosen, **{option: values[option] for option in needed}}
    for option in parameters:  # of the library, which knows those that are settings
        with contextlib.suppress(errors.InvalidArgumentError):
            rules.rule_from_settings({**every, option: values[option]})
            every[option] = values[option]
    assert "learning_rate" in every
    made, _ = served(**every)
    assert made.name == "agn"
    for option in needed:
        others = {n: value for n, value in every.items() if n != option}
        output = fails("serve", *arguments_of(others), code=2)
        assert f"needs --{option.replace('_', '-')}" in output


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "no rule: give --rule NAME .agn, .*--rule-from"),
        ({"learning_rate": 0.1}, "no rule"),
        ({"rule": "ang"}, "--rule must be one of agn, .*moments, got 'ang'"),
        ({"rule": "agn"}, "rule agn needs --center-optimizer, one of adabelief, "),
        ({"rule": "easgd"}, "rule easgd needs --moving-rate"),
        ({"rule": "easgd", "moving_rate": 2.0}, r"moving_rate must be .*\(0, 1\]"),
        ({"rule": "downpour", "rho": 0.1}, "--rho does not apply to rule downpour"),
        ({"rule": "downpour", "b1": 0.1}, "--b1 does not apply to rule downpour"),
        (
            {"rule": "downpour", "center_optimizer": "sgd"},
            "--center-optimizer does not apply to rule downpour",
        ),
        (
            {"rule": "diloco", "learning_rate": 0.1},
            "--learning-rate does not apply to rule diloco",
        ),
        (
            {"rule": "agn", "center_optimizer": "adma", "learning_rate": 0.1},
            "--center-optimizer must be one of .*, yogi, .*, got 'adma'",
        ),
        (
            {"rule": "agn", "center_optimizer": "sgd", "learning_rate": 1.0, "b2": 0.1},
            "--b2 does not apply to rule agn with center optimizer sgd",
        ),
        (
            {
                "rule": "agn",
                "center_optimizer": "sgd",
                "learning_rate": float("nan"),
            },
            "--learning-rate must be a number in .*nan",
        ),
        (
            {"rule_from": "m:rule", "learning_rate": 0.1},
            "--learning-rate does not go with --rule-from",
        ),
        (
            {"rule": "average", "answers": "identity"},
            "--answers must be one of bfloat16",
        ),
        ({"rule_from": "m"}, "--rule-from must be \"module:object\", got 'm'"),
        ({"rule_from": "not_there:rule"}, "No module named 'not_there'"),
        ({"rule_from": "math:rule"}, "has no attribute 'rule'"),
        ({"rule_from": "math:pi"}, "must be an agn_optax.rules.Rule.*got 3.14"),
    ],
)
def test_bad_rules_are_rejected(options, message):
    output = fails("serve", *arguments_of(options), code=2)
    assert re.search(message, output), output


@pytest.fixture
def training(tmp_path, monkeypatch):
    """A user's module in the current directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_training.py").write_text(
        "import agn_optax\n"
        "rule = agn_optax.rules.downpour()\n"
        "class settings:\n"
        "    def make(): return agn_optax.rules.easgd(0.25)\n"
        "    def broken(): return 1 / 0\n"
        "    def needs(rate): return agn_optax.rules.easgd(rate)\n"
    )
    yield
    sys.modules.pop("my_training", None)


def test_rule_is_imported_from_a_module(training, served):
    made, _ = served(rule_from="my_training:rule")
    assert made.name == "downpour"
    made, _ = served(rule_from="my_training:settings.make")
    fingerprint.compare(fingerprint.fingerprint(made), rules.easgd(0.25), "here")
    result = command("serve", "--rule-from=my_training:settings.broken")
    # The user's error is not replaced.
    assert isinstance(result.exception, ZeroDivisionError)
    output = fails("serve", "--rule-from=my_training:settings.needs", code=2)
    assert "a function without arguments" in output


@pytest.mark.parametrize(
    ("options", "mode"),
    [
        ({"max_rounds_ahead": 2}, BoundedStaleness(rounds=2)),
        ({"max_versions_behind": 0}, BoundedStaleness(versions=0)),
        ({"quorum": 2, "grace": 1.5, "late": "drop"}, Synchronous(2, 1.5, "drop")),
        (
            {"quorum": 2, "slack_steps": 5, "slack_share": 0.5, "sync_time": 0.1},
            Synchronous(2, slack_steps=5, slack_share=0.5, sync_time=0.1),
        ),
    ],
)
def test_mode_is_made_from_options(options, mode, served):
    name = "bounded" if isinstance(mode, BoundedStaleness) else "synchronous"
    _, settings = served(rule="downpour", mode=name, **options)
    assert settings["mode"] == mode


def test_message_limits_are_made_from_options(served):
    own = {"nonfinite": False, "norm": 3.0, "times_median": 9.0}
    own |= {"in_a_row": 7, "steps": 9, "weight": 5.0}
    assert set(own) == {field.name for field in dataclasses.fields(MessageLimits)}
    options = {f"reject_{name}": own[name] for name in own}
    _, settings = served(rule="downpour", **options)
    assert settings["limits"].messages == MessageLimits(**own)


DEFAULTS = {
    "page": None,
    "mode": Asynchronous(),
    "durability": None,
    "limits": service.Limits(messages=MessageLimits()),
    "security": service.Security(),
    "thresholds": Thresholds(),
}


def test_thresholds_are_made_from_options(served):
    options = {"warn_lost_messages": 0.5, "warn_apart": 0, "warn_one_by_one": 4}
    _, settings = served(rule="downpour", **options)
    expected = Thresholds(lost_messages=0.5, apart=0, one_by_one=4)
    assert settings["thresholds"] == expected


def test_defaults_are_those_of_the_library(served):
    _, settings = served(rule="downpour")
    assert settings == DEFAULTS


@pytest.mark.parametrize(
    ("options", "limits"),
    [
        ({"max_workers": 3, "lease": 2.0}, service.Limits(max_workers=3, lease=2.0)),
        ({"calls": 0.5}, service.Limits(calls=0.5)),
    ],
)
def test_options_of_limits_become_limits(options, limits, served):
    _, settings = served(rule="downpour", **options)
    assert dataclasses.replace(settings["limits"], messages=None) == limits


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ({"address": "a:1", "barrier": 2}, {"address": "a:1", "barrier": 2}),
        ({"dtype": "float32", "device": "gpu"}, {"dtype": "float32", "device": "gpu"}),
        ({"direct_address": "a:1"}, {"direct_address": "a:1"}),
        ({"direct_address": "a:1", "direct": True}, {"direct_address": "a:1"}),
        ({"direct": False}, {"direct_address": False}),
        ({"insecure": True}, {"security": service.Security(insecure=True)}),
    ],
)
def test_options_become_arguments_of_serve(options, settings, served):
    _, made = served(rule="downpour", **options)
    assert made == DEFAULTS | settings


def test_serve_applies_message_limits(address):
    def exchange(center):
        answer = sessions.exchange(
            center, jnp.full(4, 2.0), anchor_version=0, worker="w"
        )
        assert answer.rejected == "its norm is 4, and this center takes 3 at most"

    def start(center):
        center.initialize(jnp.zeros(4), worker="w")
        exchange(center)

    options = ("--rule=downpour", "--reject-norm=3", "--no-reject-nonfinite")
    serve(address, rules.downpour(), *options, then=start)


D = pathlib.Path("d")


@pytest.mark.parametrize(
    ("options", "durability"),
    [
        ({}, None),
        ({"journal": "d", "journal_size": 9}, Journal(D, size=9)),
        ({"journal": "d"}, Journal(D)),
        (
            {"journal": "d", "journal_keep": "contributions", "journal_limit": 9},
            Journal(D, keep="contributions", limit=9),
        ),
    ],
)
def test_durability_is_made_from_options(options, durability, served):
    _, settings = served(rule="downpour", **options)
    assert settings["durability"] == durability


def test_serve_ends_when_its_journal_cannot_be_written(address, tmp_path, monkeypatch):
    """It ends by itself, with an error that gives the reason."""

    def full(file, sync):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def exchange(center):
        center.initialize(jnp.zeros(2), worker="w")
        sessions.join(center, "w")
        tuning.set_journal_sync(monkeypatch, full)
        with pytest.raises(errors.CenterClosedError, match="No space left on device"):
            sessions.exchange(center, jnp.ones(2), anchor_version=0, worker="w")

    with pytest.raises(
        AssertionError, match=r"no longer be saved in .* No space left on"
    ):
        serve(
            address,
            rules.downpour(),
            "--rule=downpour",
            f"--journal={tmp_path}/kept",
            then=exchange,
        )


def test_serve_combines_a_round_with_krum(address):
    rule = dataclasses.replace(rules.average(), combine=agn_optax.robust.krum())

    def exchange(center):
        workers = [center.join(f"worker-{i}") for i in range(5)]
        center.initialize(jnp.zeros(2), worker="worker-0")
        for i, worker in enumerate(workers):
            sent = jnp.full(2, -1e9 if i == 2 else 1.0 + i)
            worker.submit(Submission(1, sent, anchor_version=0))
        answer = workers[0].collect(1)
        assert jnp.array_equal(answer.params, [-2.0, -2.0])

    options = ["--rule=average", "--combine=krum", "--mode=synchronous"]
    serve(address, rule, *options, then=exchange)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mode=fast"], "--mode must be one of asynchronous, bounded, synchronous"),
        (["--mode=bounded"], "needs --max-versions-behind, --max-rounds-ahead or both"),
        (["--quorum=2"], "--quorum applies to --mode synchronous, and the mode is"),
        (["--combine=mode"], "--combine must be one of sum, mean, median, krum"),
        (["--combine=median"], "got rule 'downpour' with median, mode=Asynchronous()"),
        (["--mode=synchronous", "--max-rounds-ahead=1"], "applies to --mode bounded"),
        (["--mode=synchronous", "--late=never"], "late must be 'next'"),
        (["--mode=synchronous", "--slack-steps=2"], "slack_steps needs a quorum"),
        (["--rule=decoupled_diloco"], "with radial, mode=Asynchronous()"),
        (["--mode=synchronous", "--quorum=0"], "quorum must be a whole number >= 1"),
        (["--address=nowhere"], 'an address must be "host:port"'),
        (["--address=0.0.0.0:0"], "insecure=True"),
        (["--lease=-1"], "lease must be"),
        (["--max-workers=0"], "max_workers must be"),
        (["--dtype=int32"], "dtype must be a floating dtype"),
        (["--device=abacus"], "device must be"),
        (["--journal-size=5"], "--journal-size needs --journal"),
        (["--journal=a", "--journal-keep=all"], "keep must be 'contributions', "),
        (["--journal=a", "--journal-limit=5"], "limit needs keep='contributions'"),
        (["--journal=a", "--journal-size=0"], "size must be a whole number >= 1"),
        (["--no-direct", "--direct-address=a:1"], "--no-direct exclude each other"),
        (["--open", "--tokens=t"], "--tokens and --open exclude each other"),
        (["--tokens=no such file"], "cannot read no such file"),
        ([f"--tokens={__file__}"], "line 1 of "),
        (["--tls-certificate=c.pem"], "a certificate and its key go together"),
        (["--tls-client-ca=c.pem"], "needs --tls-certificate and --tls-key"),
        (["--tls-certificate=c.pem", "--tls-key=c.pem"], "cannot be used"),
        ([f"--tls-certificate={__file__}", f"--tls-key={__file__}"], "cannot be used"),
    ],
)
def test_bad_settings_are_rejected(arguments, message):
    output = fails("serve", "--rule=downpour", *arguments, code=2)
    assert message in output
    assert "Traceback" not in output


def test_serve_says_that_a_center_on_disk_continues(tmp_path, address):
    rule, folder = rules.downpour(), tmp_path / "journal"
    ones = jnp.ones(2)
    with agn_optax.LocalCenter(rule, ones, durability=Journal(folder)) as center:
        sessions.exchange(center, ones, anchor_version=0, worker="anna")
    result = serve(address, rule, "--rule=downpour", f"--journal={folder}", "--open")
    assert result.stdout == (
        f"serving downpour at {address}\ncontinuing at version 1, which was on disk\n"
    )


def test_serve_reads_options_from_a_file(tmp_path, address):
    path = tmp_path / "center.toml"
    path.write_text(
        'rule = "agn"\ncenter-optimizer = "adam"\nlearning-rate = 1\n'
        'mode = "bounded"\nmax-rounds-ahead = 3\n'
    )
    descriptions = []
    result = serve(
        address,
        rules.agn(optax.adam(0.25)),
        f"--config={path}",
        "--learning-rate=0.25",
        "--lease=7",
        "--open",
        then=lambda center: descriptions.append(sessions.remote(center).describe()),
    )
    assert result.stdout == f"serving agn at {address}\n"
    assert "draining after SIGTERM; send it again to end at once\n" in result.stderr
    assert descriptions[0].lease == 7
    assert descriptions[0].mode == "BoundedStaleness(versions=None, rounds=3)"


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rule=diloco"], "diloco is a rule for rounds, and in mode Async"),
        (["--rule=average", "--mode=bounded", "--max-rounds-ahead=1"], "average is a"),
        (["--rule=diloco", "--mode=synchronous"], ""),
        (["--rule=downpour"], ""),
    ],
)
def test_rule_for_rounds_in_another_mode_is_warned_about(
    address, options, message, caplog
):
    name = options[0].removeprefix("--rule=")
    serve(address, getattr(rules, name)(), *options, "--open")
    logged = [record.getMessage() for record in caplog.records]
    lines = [line for line in logged if "rounds" in line]
    assert len(lines) == bool(message)
    assert all(line.startswith(message) for line in lines)


def test_serve_imports_its_rule_and_prints_json(training, address):
    result = serve(
        *(address, rules.easgd(0.25), "--rule-from=my_training:settings.make"),
        *("--json", "--open"),
    )
    assert json.loads(result.stdout) == {
        "event": "serving",
        "rule": "easgd",
        "address": address,
        "version": 0,
        "direct_address": None,
        "token": None,
        "page": None,
        "page_token": None,
    }


def test_sigterm_drains_the_process():
    arguments, environment = python(
        *(
            "-m",
            "agn_optax.ops.cli",
            "serve",
            "--rule=downpour",
            "--address=127.0.0.1:0",
        ),
    )
    with subprocess.Popen(  # noqa: S603 our own program
        arguments,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            line = process.stdout.readline()
            assert line.startswith("serving downpour at 127.0.0.1:")
            also = process.stdout.readline()
            assert also.startswith("direct connections at 127.0.0.1:")
            rule = rules.downpour()
            address = line.split()[-1]
            with service.connect(address, rule, timeout=PATIENCE) as center:
                worker = agn_optax.Worker(center, optax.sgd(1.0), period=1, name="a")
                params, state = worker.start(jnp.zeros(2), chief=True)
                params, state = worker.exchange(params, state)
                process.send_signal(signal.SIGTERM)
                lines = iter(process.stderr.readline, "")
                assert any(line.startswith("draining after SIGTERM") for line in lines)
                assert process.wait(PATIENCE) == 0
                log = process.stderr.read()
                assert "agn-optax: the center ends at version 1, hash " in log
        finally:
            process.kill()


def test_signal_to_another_thread_is_handled(address):
    """The client signals its own thread while the main thread waits."""
    result = serve(address, rules.downpour(), "--rule=downpour")
    assert "draining after SIGTERM; send it again to end at once\n" in result.stderr


def test_signal_handler_runs_during_server_wait():
    """Also if the system delivers the signal to a thread that does not wait."""
    before = signal.signal(signal.SIGUSR1, lambda *_: server.stop())
    try:
        with service.serve(rules.downpour()) as server:
            waits = threading.Event()

            def kill():
                assert waits.wait(PATIENCE)
                signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)

            killer = threading.Thread(target=kill)
            killer.start()
            assert not server.wait(0.0)
            waits.set()
            assert server.wait(PATIENCE)
            killer.join()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_stop_in_a_second_signal_handler_returns_at_once():
    """The handler runs in the thread that is already in `Server.stop`."""
    handled = threading.Event()

    def stop(*_):
        server.stop()
        handled.set()

    def hangs(*_):
        raise TimeoutError("a handler waits for the call that it interrupts")

    def kill():
        # The center counts this as an exchange that is being applied.
        with sessions.servicer(server).exchanges.counting("answering"):
            begun.set()
            assert server.center.core.wait_until_closed(PATIENCE)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
            handled.wait(PATIENCE)

    begun = threading.Event()
    before = {
        signal.SIGUSR1: signal.signal(signal.SIGUSR1, stop),
        signal.SIGALRM: signal.signal(signal.SIGALRM, hangs),
    }
    signal.setitimer(signal.ITIMER_REAL, PATIENCE / 2)
    try:
        server = service.serve(rules.downpour())
        killer = threading.Thread(target=kill)
        killer.start()
        assert begun.wait(PATIENCE)
        server.stop()
        assert handled.is_set()
        assert server.wait(0.0)
        killer.join(PATIENCE)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for signum, handler in before.items():
            signal.signal(signum, handler)


def test_serve_with_mutual_tls(tmp_path):
    certificate, key = certificates.make(tmp_path)
    trust = [f"--tls-ca={certificate}"]
    own = [f"--tls-certificate={certificate}", f"--tls-key={key}"]
    address = ports.free_address()
    results = []

    def look(_):
        for options in (
            [],
            [f"--tls-ca={certificate}"],
            [f"--tls-ca={certificate}", *own],
        ):
            results.append(
                command("doctor", address, "--json", "--timeout=2", *options)
            )
        results.append(command("status", address, *trust, *own))

    tls = service.Tls(certificate, certificate, key)
    serve(
        address,
        rules.downpour(),
        "--rule=downpour",
        *own,
        f"--tls-client-ca={certificate}",
        then=look,
        tls=tls,
    )
    assert [each.exit_code for each in results] == [1, 1, 0, 0]
    assert "speaks TLS: give --tls-ca" in results[0].stdout
    assert "requires a certificate of this end" in results[1].stdout
    assert '"message": "TLS"' in results[2].stdout
