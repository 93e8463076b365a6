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
    """Return the addresses in titles of tables, and the first columns below them."""
    found = re.findall(r"^(?:│ |downpour at )([^ │]+)", output, re.MULTILINE)
    return [each.rstrip(":") for each in found]


def test_status_of_a_site_names_its_parent():
    with (
        service.serve(RULE, jnp.zeros(2)) as root,
        service.connect(root.address, RULE) as parent,
        service.serve(RULE, parent=service.Parent(parent, name="site")) as site,
    ):
        assert site.uplink.ready.wait(30)
        output = succeeds("status", f"{root.address},{site.address}")
        assert shown(output) == [root.address, "site", site.address]
        found = json.loads(succeeds("status", site.address, "--json"))
        assert found["parent"] == root.address


def test_status_and_watch_show_all_shards():
    with service.serve(RULE) as one, service.serve(RULE) as other:
        both = f"{one.address}, {other.address}"
        with service.connect(both, RULE) as center:
            center.initialize({"a": jnp.zeros(4), "b": jnp.zeros(4)}, worker="")
            center.join("worker-0")
            output = succeeds("status", both)
            addresses = [one.address, other.address]
            expected = [(each, "worker-0") for each in addresses]
            assert shown(output) == [name for pair in expected for name in pair]
            lines = succeeds(
                "watch", both, "--count=2", "--interval=0.05", "--json"
            ).splitlines()
            looks = [json.loads(line)["centers"] for line in lines]
            assert [[e["address"] for e in look] for look in looks] == [addresses] * 2
        other.stop()
        output = fails("status", both, code=1)
        assert f"the center at {other.address} does not answer" in output
        result = command("status", both)
        assert shown(result.stdout) == [one.address]
        assert f"waiting: {other.address}: " in result.stdout


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
        _, table, warning = printed[1].renderables
        assert other.address in str(table.title)
        assert f"waiting: {other.address}" in str(warning)


def test_bad_addresses_are_rejected():
    assert "must be" in fails("status", "nowhere,127.0.0.1:1", code=2)
    twice = "127.0.0.1:1,127.0.0.1:1"
    assert "several different ones expected" in fails("watch", twice, code=2)
