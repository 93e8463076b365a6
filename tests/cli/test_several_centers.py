"""``agn-optax status`` and ``watch`` of several centers: shards, and trees."""

import contextlib
import json
import re

import jax.numpy as jnp
import optax
from helpers import shared
from helpers.commands import command, fails, succeeds
from helpers.waiting import wait_until

import agn_optax
from agn_optax import service

RULE = shared.downpour()


@contextlib.contextmanager
def tree(root=None, sites=("site-a", "site-b")):
    """A root and its sites, each of which has a worker that has exchanged once."""
    with contextlib.ExitStack() as stack:
        if root is None:
            root = stack.enter_context(service.serve(RULE, jnp.zeros(2)))
        servers = []
        for number, name in enumerate(sites):
            address = getattr(root, "address", root)
            parent = stack.enter_context(service.connect(address, RULE))
            site = stack.enter_context(
                service.serve(RULE, parent=service.Parent(parent, period=1, name=name))
            )
            assert site.uplink.ready.wait(30)
            servers.append(site)
            center = stack.enter_context(service.connect(site.address, RULE))
            worker = agn_optax.Worker(
                center, shared.sgd(1.0), period=1, name=f"worker-{number}"
            )
            params, state = worker.start()
            updates, state = worker.tx.update(jnp.ones(2), state, params)
            worker.exchange(optax.apply_updates(params, updates), state)
        yield root, servers


def shown(output):
    """Return the first column of a table, with its indents."""
    return re.findall(r"^│ ( *[^ │]+)", output, re.MULTILINE)


def test_status_shows_the_whole_tree_from_every_center():
    with tree() as (root, (a, b)):
        wait_until(lambda: root.center.version == 2)
        for address in (root.address, a.address, b.address):
            output = succeeds("status", address, "--tree")
            assert shown(output) == [
                root.address,
                "  site-a",
                f"    {a.address}",
                "      worker-0",
                "  site-b",
                f"    {b.address}",
                "      worker-1",
            ]
            assert "downpour: 3 of 3 centers, 4 workers" in output
            found = json.loads(succeeds("status", address, "--tree", "--json"))
            assert [
                (each["address"], each["depth"], each["under"])
                for each in found["centers"]
            ] == [
                (root.address, 0, None),
                (a.address, 1, [root.address, "site-a"]),
                (b.address, 1, [root.address, "site-b"]),
            ]
            assert not any(each["error"] for each in found["centers"])
        assert found["centers"][0]["version"] == 2


def test_status_shows_a_tree_of_three_levels():
    with tree(sites=["site"]) as (root, (site,)), tree(site, ["below"]) as (_, (low,)):
        output = succeeds("status", low.address, "--tree")
        names = shown(output)
        assert names[:3] == [root.address, "  site", f"    {site.address}"]
        assert f"        {low.address}" in names


def test_tree_names_centers_that_cannot_be_reached():
    with tree() as (root, (a, b)):
        a.stop()
        # It has left its parent, which no longer knows its address.
        wait_until(lambda: len(root.center.core.members()[1]) == 1)
        root._servicer._traffic["site-b"].serves_at = "127.0.0.1:1"
        text = succeeds("status", root.address, "--tree")
        assert "not reachable: 127.0.0.1:1: the center at 127.0.0.1:1 does not" in text
        assert "downpour: 1 of 2 centers" in text
        # A site whose parent has stopped is still shown, and its parent is named.
        root.stop()
        result = command("status", b.address, "--tree", "--json")
        assert result.exit_code == 0, result.output
        first, second = json.loads(result.stdout)["centers"]
        assert first["address"] == root.address
        assert "does not answer" in first["error"]
        assert (second["address"], second["error"]) == (b.address, "")


def test_center_with_two_addresses_is_shown_once():
    with tree(sites=["site"]) as (root, (site,)):
        again = site.address.replace("127.0.0.1", "localhost")
        output = succeeds("status", f"{again},{site.address}", "--tree")
        assert shown(output)[0] == root.address
        assert len([name for name in shown(output) if "worker" in name]) == 1


def test_cycle_in_a_tree_is_followed_once():
    """A worker may announce the address of any center, also of one above it."""
    with (
        tree(sites=["site"]) as (root, (site,)),
        service.connect(site.address, RULE) as center,
    ):
        center.announce(root.address)
        center.join("ouroboros")
        for address in (root.address, site.address):
            output = succeeds("status", address, "--tree")
            assert shown(output).count(root.address) == 1
            assert "2 of 2 centers" in output
        both = f"{root.address},{root.address.replace('127.0.0.1', 'localhost')}"
        assert "2 of 2 centers" in succeeds("status", both, "--tree")


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
            assert looks[0][0]["exchanges_per_second"] is None
            assert looks[1][0]["exchanges_per_second"] == 0
        other.stop()
        output = fails("status", both, code=1)
        assert f"the center at {other.address} does not answer" in output
        result = command("status", both)
        assert shown(result.stdout) == [one.address]
        assert f"not reachable: {other.address}: " in result.stdout


def test_site_with_a_sharded_parent_is_shown_once():
    """The site is listed under each shard; its own center is listed once."""
    with service.serve(RULE) as one, service.serve(RULE) as other:
        both = [one.address, other.address]
        with service.connect(both, RULE) as center:
            center.initialize({"a": jnp.zeros(2), "b": jnp.zeros(2)}, worker="")
        parent = service.connect(both, RULE)
        with (
            parent,
            service.serve(RULE, parent=service.Parent(parent, name="site")) as site,
        ):
            assert site.uplink.ready.wait(30)
            output = succeeds("status", site.address, "--tree")
            assert shown(output) == [
                *(one.address, "  site", f"    {site.address}"),
                *(other.address, "  site"),
            ]


def test_watch_of_a_tree_keeps_a_site_that_stops(monkeypatch):
    with tree(sites=["site"]) as (root, (site,)):
        both = f"{root.address},{site.address}"
        printed = []

        @contextlib.contextmanager
        def live(*, enabled):
            def show(table):
                printed.append(table)
                if len(printed) == 1:
                    site.stop()

            yield show

        monkeypatch.setattr("agn_optax.ops.cli._table.live", live)
        output = fails("watch", both, "--tree", "--count=2", "--interval=0.1", code=1)
        assert f"the center at {site.address} does not answer" in output
        table, *warnings = printed[1].renderables
        names = list(table.columns[0].cells)
        assert site.address in "".join(map(str, names))
        assert f"not reachable: {site.address}" in str(warnings[0])


def test_bad_addresses_are_rejected():
    assert "must be" in fails("status", "nowhere,127.0.0.1:1", code=2)
    twice = "127.0.0.1:1,127.0.0.1:1"
    assert "several different ones expected" in fails("watch", twice, code=2)
