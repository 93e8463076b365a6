"""A center that publishes its address in a file."""

import socket
import threading

import jax.numpy as jnp
import optax
import pytest
from helpers import ports

import agn_optax
from agn_optax import errors, rules, service
from agn_optax.center import Journal

RULE = rules.downpour()


def test_clients_find_the_center_by_its_file(tmp_path):
    path = tmp_path / "center"
    with service.serve(RULE, jnp.ones(2)) as server:
        with service.published(server.address, path):
            assert path.read_text() == f"{server.address}\n"
            with service.connect(f"file:{path}", RULE) as center:
                assert center.pull().version == 0
                assert center.address == server.address
            with service.Observer(f"file:{path}") as observer:
                assert observer.status()["version"] == 0
        assert not path.exists()


def test_center_restarted_at_another_address_is_found_again(tmp_path):
    path, kept = tmp_path / "center", Journal(tmp_path / "journal")
    address = ports.free_address()
    first = service.serve(RULE, jnp.ones(2), address=address, durability=kept)
    with service.published(first.address, path):
        center = service.connect(f"file:{path}", RULE)
        worker = agn_optax.Worker(center, optax.sgd(0.5), period=1, name="worker-0")
        params, state = worker.start()

        def step(params, state):
            updates, state = worker.tx.update(params, state, params)
            params = optax.apply_updates(params, updates)
            return worker.exchange(params, state)

        params, state = step(params, state)
        first.stop()
        # The first port is occupied, so the second center gets another one.
        host, port = first.address.split(":")
        with (
            socket.create_server((host, int(port))),
            service.serve(RULE, durability=kept) as second,
            service.published(second.address, path),
        ):
            assert second.address != first.address
            params, state = step(params, state)
            params, state = worker.flush(params, state)
            assert center.address == second.address
            assert center.pull().version == 2
            center.close()
    assert jnp.array_equal(params, jnp.full(2, 0.25))


def test_connect_waits_until_the_file_has_an_address(tmp_path):
    path = tmp_path / "center"
    with pytest.raises(errors.CenterUnreachableError, match="No such file"):
        service.connect(f"file:{path}", RULE, timeout=0.3)
    found = []
    thread = threading.Thread(
        target=lambda: found.append(service.connect(f"file:{path}", RULE, timeout=60))
    )
    thread.start()
    with service.serve(RULE, jnp.ones(2)) as server:
        path.write_text("half an addr")  # not an address
        with service.published(server.address, path):
            thread.join(60)
            (center,) = found
            center.close()


def test_address_published_by_another_center_is_not_removed(tmp_path):
    path = tmp_path / "center"
    with service.published("127.0.0.1:1", path):
        path.write_text("127.0.0.1:2\n")
    assert path.read_text() == "127.0.0.1:2\n"


def test_center_on_all_interfaces_publishes_its_host_name(tmp_path):
    path = tmp_path / "center"
    with service.published("0.0.0.0:5", path):
        assert path.read_text() == f"{socket.gethostname()}:5\n"


def test_plain_text_to_another_machine_needs_insecure(tmp_path):
    path = tmp_path / "center"
    path.write_text("192.0.2.1:5\n")
    with pytest.raises(errors.InvalidArgumentError, match=r"192.0.2.1:5 is not for"):
        service.connect(f"file:{path}", RULE, timeout=0.3)


def test_file_must_be_in_an_existing_folder(tmp_path):
    with (
        pytest.raises(errors.InvalidArgumentError, match="cannot be written"),
        service.published("127.0.0.1:1", tmp_path / "no" / "center"),
    ):
        pass
    with pytest.raises(errors.InvalidArgumentError, match="path of a file"):
        service.connect("file:", RULE)
