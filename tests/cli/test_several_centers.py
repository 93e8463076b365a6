"""``agn-optax status`` and ``watch`` of several centers."""

import contextlib
import json
import re

import jax.numpy as jnp
from helpers import shared
from helpers.commands import command, fails, succeeds

from agn_optax import service

RULE = shared.downpour()


def shown(output):
    """Return the first column of a table, with its indents."""
    return re.findall(r"^│ ( *[^ │]+)", output, re.MULTILINE)


def test_status_and_watch_show_all_shards():
    with service.serve(RULE) as one, service.serve(RULE) as other:
        both = f"{one.address}, {other.address}"
        with service.connect(both, RULE) as center:
            center.initialize({"a": jnp.zeros(4), "b": jnp.zeros(4)}, worker="")
            center.join("worker-0")
            output = succeeds("status", both)
            addresses = [one.address, other.address]
            expected = [(each, "  worker-0") for each in addresses]
            assert shown(output) == [name for pair in expected for name in pair]
            assert "downpour: 2 of 2 centers, 2 workers" in output
            lines = succeeds(
                "watch", both, "--count=2", "--interval=0.05", "--json"
            ).splitlines()
            looks = [json.loads(line)["centers"] for line in lines]
            assert [[e["address"] for e in look] for look in looks] == [addresses] * 2
            assert looks[0][0]["updates_per_second"] is None
            assert looks[1][0]["updates_per_second"] == 0
        other.stop()
        output = fails("status", both, code=1)
        assert f"the center at {other.address} does not answer" in output
        result = command("status", both)
        assert shown(result.stdout) == [one.address]
        assert f"not reachable: {other.address}: " in result.stdout


def test_watch_keeps_a_center_that_stops(monkeypatch):
    with service.serve(RULE) as one, service.serve(RULE) as other:
        both = f"{one.address},{other.address}"
        printed = []

        @contextlib.contextmanager
        def live(*, enabled):
            def show(table):
                printed.append(table)
                if len(printed) == 1:
                    other.stop()

            yield show

        monkeypatch.setattr("agn_optax.ops.cli._table.live", live)
        output = fails("watch", both, "--count=2", "--interval=0.1", code=1)
        assert f"the center at {other.address} does not answer" in output
        table, *warnings = printed[1].renderables
        names = list(table.columns[0].cells)
        assert other.address in "".join(map(str, names))
        assert f"not reachable: {other.address}" in str(warnings[0])


def test_bad_addresses_are_rejected():
    assert "must be" in fails("status", "nowhere,127.0.0.1:1", code=2)
    twice = "127.0.0.1:1,127.0.0.1:1"
    assert "several different ones expected" in fails("watch", twice, code=2)
