"""``agn-optax status`` and ``watch`` of a center in the same process."""

import io
import json
import re

import jax.numpy as jnp
import optax
import pytest
import rich.console
import typer
from helpers.commands import command, fails, succeeds

from agn_optax import Worker, errors, rules, service
from agn_optax.center import MessageLimits
from agn_optax.ops import units

RULE = rules.downpour()


def test_status_shows_center_and_workers(new_server):
    output = succeeds("status", new_server.address)
    assert f"easgd at {new_server.address}: version 2, 8 parameters (32 B)" in output
    (row,) = re.findall("│ worker-0.*", output)
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert cells[:3] == ["worker-0", "yes", "2"]
    assert float(cells[3]) > 0  # exchanges a second
    assert cells[4] == "1"  # staleness
    assert cells[5] in ("memory", "socket", "grpc")
    assert cells[7:10] == ["2", "0", "0"]  # period, rejected, dropped
    assert "exchanges/s" in output


def test_status_as_json(new_server):
    reply = json.loads(succeeds("status", new_server.address, "--json"))
    assert reply["address"] == new_server.address
    assert (reply["rule"], reply["version"], reply["parameters"]) == ("easgd", 2, 8)
    (worker,) = reply["workers"]
    assert worker["name"] == "worker-0"
    assert worker["norm"] > 0
    assert worker["seen"] <= worker["joined"]
    assert worker["exchanges_per_second"] > 0
    assert worker["steps_per_second"] == 2 * worker["exchanges_per_second"]
    assert worker["stalled"] is None


def test_status_watch_and_doctor_show_notices():
    limits = service.Limits(messages=MessageLimits(norm=1.0), calls=None)
    params = {"w": jnp.ones(4)}
    with (
        service.serve(RULE, params, limits=limits) as server,
        service.connect(server.address, RULE) as center,
    ):
        worker = Worker(center, optax.sgd(10.0), period=1, name="anna")
        params, state = worker.start()
        for _ in range(2):
            updates, state = worker.tx.update(params, state, params)
            params = optax.apply_updates(params, updates)
            params, state = worker.exchange(params, state)
        assert worker.rejected == 2
        found = "2 of the last 2 messages of worker 'anna' were rejected"
        remedy = "take a smaller learning rate"
        for name, *options in ("status",), ("watch", "--count=1"), ("doctor", "--json"):
            shown = " ".join(succeeds(name, server.address, *options).split())
            assert found in shown, shown
            assert remedy in shown, shown
        (notice,) = json.loads(succeeds("status", server.address, "--json"))["notices"]
        assert (notice["check"], notice["worker"]) == ("lost_messages", "anna")


def test_status_of_a_center_without_parameters():
    with service.serve(rules.downpour()) as server:
        assert "no parameters yet" in succeeds("status", server.address)
        assert (
            json.loads(succeeds("status", server.address, "--json"))["version"] is None
        )


@pytest.mark.parametrize("command", [("status",), ("watch", "--count=1")])
def test_unreachable_center_is_reported(command, nowhere):
    output = fails(*command, nowhere, code=1)
    assert f"the center at {nowhere} does not answer: UNAVAILABLE" in output


@pytest.mark.parametrize("name", ["status", "watch"])
def test_bad_addresses_are_rejected(name):
    assert "must be" in fails(name, "nowhere", code=2)
    assert "must be" in fails(name, "a:\N{SUPERSCRIPT TWO}", code=2)  # it is a digit
    assert "insecure=True" in fails(name, "192.0.2.1:80", code=2)
    assert "needs --tls-ca" in fails(
        *(name, "a:1", f"--tls-certificate={__file__}", f"--tls-key={__file__}"), code=2
    )


def test_watch_prints_a_table_at_each_interval(server):
    output = succeeds("watch", server.address, "--count=2", "--interval=0.05")
    assert output.count("│ worker-0") == 2
    assert output.count("exchanges/s") == 2


def become_a_terminal(monkeypatch, width):
    """Have the output of commands taken for a terminal of a width."""
    terminal = {"FORCE_COLOR": "1", "TERM": "xterm", "LINES": "50"}
    for name, value in {**terminal, "COLUMNS": str(width)}.items():
        monkeypatch.setenv(name, value)
    for name in ("NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


def test_watch_on_a_terminal_redraws_the_table(server, monkeypatch):
    """Each table replaces the one before."""
    become_a_terminal(monkeypatch, 160)
    output = succeeds("watch", server.address, "--count=2", "--interval=0.05")
    assert output.count("worker-0") >= 2
    assert "\x1b[2J\x1b[H" in output  # clear, and go to the first line


def a_worker(name, **values):
    return {
        "name": name,
        "connected": True,
        "exchanges": 12345,
        "exchanges_per_second": 3.25,
        "stalled": None,
        "staleness": 7,
        "transport": "memory",
        "interface": "",
        "rate": 2.5e9,
        "seen": 0.4,
        "period": 100,
        "rejected": 0,
        "dropped": 0,
        "steps_delivered": 1234500,
        "weight_delivered": 0.0,
        "waits": False,
        "reported": {"loss": 0.5},
        **values,
    }


@pytest.fixture
def replies(server, monkeypatch):
    """A list of values by which those of the center's next statuses are replaced."""
    left, status = [], service.Observer.status
    monkeypatch.setattr(
        service.Observer, "status", lambda self: {**status(self), **left.pop(0)}
    )
    return left


@pytest.fixture
def shown(server, replies, monkeypatch):
    """A function that returns the table of workers on a terminal of a width."""

    def show(workers, width):
        become_a_terminal(monkeypatch, width)
        replies.append({"workers": workers})
        return re.sub(r"\x1b\[[\d;]*m", "", succeeds("status", server.address))

    return show


@pytest.mark.parametrize("width", [40, 60, 80, 160])
def test_narrow_table_keeps_names_and_important_columns(width, shown):
    output = shown([a_worker(name) for name in ("worker-0", "worker-17")], width)
    assert max(map(len, output.splitlines())) <= width
    for name in ("worker-0", "worker-17"):
        assert f"│ {name}" in output
    header = next(
        line for line in output.splitlines() if "worker" in line and "┃" in line
    )
    titles = [title.strip() for title in header.strip("┃").split("┃")]
    assert titles[:2] == ["worker", "connected"]
    assert ("loss" in titles) == (width >= 60)
    assert ("transport" in titles) == (width >= 80)
    assert ("dropped" in titles) == (width >= 160)


def test_table_shows_stalled_and_waiting_workers(shown):
    carl = a_worker("carl", waits=True)
    output = shown([a_worker("anna", stalled=23.4), a_worker("bert"), carl], 80)
    assert re.search("anna +│ stalled 23 s │", output)
    assert re.search("carl +│ +waits │", output)
    assert re.search("bert +│ +yes │", output)


def test_watch_waits_for_a_center_that_has_not_started(unix_address, monkeypatch):
    """When the center stops, watch keeps the last table."""
    address = unix_address
    servers, looks, show = [], [], rich.console.Console.print

    def shows(console, table):
        out = rich.console.Console(file=io.StringIO(), width=400)
        show(out, table)
        looks.append(" ".join(out.file.getvalue().split()))  # a title can wrap
        if len(looks) == 1:
            servers.append(
                service.serve(rules.downpour(), jnp.ones(2), address=address)
            )
        elif servers and "version 0" in looks[-1]:
            servers.pop().stop()
        elif not servers and "waiting: " in looks[-1]:
            raise KeyboardInterrupt

    monkeypatch.setattr(rich.console.Console, "print", shows)
    try:
        fails("watch", address, "--interval=0.2", "--count=300", code=1)
    finally:
        for server in servers:
            server.stop()
    assert looks[0].startswith("waiting: ")
    assert "version" not in looks[0]
    assert "version 0" in looks[-1]
    assert "waiting: " in looks[-1]


def test_watch_as_json(server):
    lines = succeeds(
        "watch", server.address, "--count=3", "--interval=0.05", "--json"
    ).splitlines()
    assert [json.loads(line)["version"] for line in lines] == [2, 2, 2]


def at_each_line(monkeypatch, act):
    """Have commands call ``act(values)`` where they would print a line of JSON."""
    echo = typer.echo

    def echoes(text, **how):
        return echo(text, **how) if how else act(json.loads(text))

    monkeypatch.setattr(typer, "echo", echoes)


def test_watch_waits_for_a_center_that_stops(unix_address, monkeypatch):
    """Then another center starts there."""
    address = unix_address
    servers = [service.serve(rules.downpour(), jnp.ones(2), address=address)]
    looks = []

    def act(values):
        looks.append(values)
        if len(looks) == 1:
            servers.pop().stop()
        if len(looks) == 2:
            servers.append(service.serve(rules.downpour(), address=address))
        if len(looks) > 2 and "error" not in values:
            raise KeyboardInterrupt

    at_each_line(monkeypatch, act)
    try:
        result = command("watch", address, "--json", "--interval=0.2", "--count=300")
    finally:
        for server in servers:
            server.stop()
    assert result.exit_code == 0, result.output
    assert looks[0]["version"] == 0
    assert "does not answer" in looks[1]["error"]
    assert looks[-1]["version"] is None


def test_watch_fails_when_its_last_look_finds_no_center(unix_address, monkeypatch):
    server = service.serve(rules.downpour(), address=unix_address)
    at_each_line(monkeypatch, lambda values: server.stop())
    output = fails(
        "watch", server.address, "--json", "--interval=0.05", "--count=2", code=1
    )
    assert "does not answer" in output or "going down" in output


def test_watch_ends_at_an_interrupt(server, monkeypatch):
    def interrupt(values):
        raise KeyboardInterrupt

    at_each_line(monkeypatch, interrupt)
    assert command("watch", server.address, "--json").exit_code == 0


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (999, "999 B"), (1048576, "1.05 MB"), (5e15, "5000 TB")],
)
def test_size_is_printed_with_its_unit(number, text):
    assert units.in_bytes(number) == text


def test_error_of_an_observer_names_the_address(nowhere):
    with (
        service.Observer(nowhere) as observer,
        pytest.raises(errors.CenterUnreachableError, match=nowhere),
    ):
        observer.describe()


def test_markup_and_escapes_in_names_and_labels_are_not_obeyed():
    """An operator's terminal shows names and labels as text."""
    name, label = "w\x1b]0;title\x07\x1b[2J\x1b[31m", "[/loss]"
    rule = rules.downpour()
    with (
        service.serve(rule, jnp.zeros(3)) as server,
        service.connect(server.address, rule) as center,
        Worker(center, optax.sgd(0.1), period=1, name=name) as worker,
    ):
        params, state = worker.start()
        worker.report(**{label: 0.5})
        worker.exchange(params, state)
        output = succeeds("status", server.address)
    assert label in output
    assert "\x1b" not in output
    assert "[31m" in output
