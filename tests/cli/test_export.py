"""``agn-optax export`` and ``--save``: checkpoints readable without agn_optax."""

import json
import signal
import subprocess

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.commands import PATIENCE, fails, python, serve, succeeds
from helpers.support import assert_identical
from orbax.checkpoint import v1 as ocp

import agn_optax
from agn_optax import rules, service
from agn_optax.center import Journal, Snapshots, Submission, read

RULE = rules.agn(optax.adam(0.1))
AGN = ["--rule=agn", "--center-optimizer=adam", "--learning-rate=0.1"]
MODEL = nn.Sequential([nn.Dense(4), nn.Dense(2)])
INPUT = np.ones((1, 3), np.float32)


@pytest.fixture
def params():
    return MODEL.init(jax.random.key(0), INPUT)


def loaded(path, like=None):
    """Load a checkpoint as a program would that does not use agn_optax."""
    like = MODEL.init(jax.random.key(0), INPUT) if like is None else like
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like
    )
    return ocp.load(path, abstract)


def moved(center, params, exchanges=2):
    """Make some exchanges; return the center's snapshot after them."""
    session = center.join("anna")
    ones = jax.tree.map(jnp.ones_like, params)
    for number in range(1, exchanges + 1):
        anchor = center.pull().version
        session.exchange(Submission(number, ones, anchor_version=anchor))
    return center.pull()


def test_export_of_a_directory_that_a_center_uses(tmp_path, params):
    kept, to = tmp_path / "kept", tmp_path / "checkpoint"
    center = agn_optax.LocalCenter(RULE, params, durability=Journal(kept))
    center.write_snapshot()
    now = moved(center, params)
    output = fails("export", kept, to, code=2)
    assert "exchanges since its last snapshot" in output
    assert not to.exists()
    output = fails("export", kept, to, "--rule=downpour", code=1)
    assert "another rule" in output
    assert not to.exists()
    reply = json.loads(succeeds("export", kept, to, *AGN, "--json"))
    assert reply == {"version": 2, "directory": str(to)}
    assert_identical(loaded(to), now.params)
    assert MODEL.apply(loaded(to), INPUT).shape == (1, 2)
    # The optimizer's state was replayed, too; after a snapshot no rule is needed.
    assert_identical(read(kept, RULE), center.save())
    center.write_snapshot()
    assert "version 2 is in" in succeeds("export", kept, tmp_path / "other")
    assert_identical(loaded(tmp_path / "other"), now.params)
    center.close()


def test_export_rejects_bad_sources_and_targets(tmp_path):
    to = tmp_path / "checkpoint"
    (tmp_path / "empty").mkdir()
    assert "there is no center in" in fails("export", tmp_path / "empty", to, code=1)
    assert "an address must be" in fails("export", tmp_path / "nowhere", to, code=2)
    to.mkdir()
    assert "exists already" in fails("export", "127.0.0.1:1", to, code=2)


@pytest.mark.parametrize(
    "where",
    ["file/to", "file/folder/to", pytest.param("folder/" + 240 * "n", id="long")],
)
def test_directory_that_cannot_be_made_is_found_before_anything_starts(tmp_path, where):
    to = tmp_path / where
    (tmp_path / "file").write_text("in the way")
    for arguments in (["export", "127.0.0.1:1", to], ["serve", *AGN, f"--save={to}"]):
        output = fails(*arguments, code=2)
        assert "a checkpoint needs a directory that can be made" in output
        assert str(to) in output


def test_directory_that_can_be_made_is_not_left_behind(tmp_path):
    """The target is checked first; the export fails because there is no center."""
    (tmp_path / "empty").mkdir()
    output = fails("export", tmp_path / "empty", tmp_path / "new/folder/to", code=1)
    assert "there is no center in" in output
    assert list((tmp_path / "new/folder").iterdir()) == []


def test_orbax_is_not_called_where_no_directory_can_be_made(
    tmp_path, params, monkeypatch
):
    """Orbax's threads would wait for that directory, and the process for them."""
    kept, to = tmp_path / "kept", tmp_path / "folder/to"

    def loses_the_folder(*arguments):
        found = read(*arguments)
        to.parent.rmdir()
        to.parent.write_text("in the way")
        return found

    monkeypatch.setattr(ocp, "save", lambda *_: pytest.fail("Orbax was called"))
    monkeypatch.setattr(agn_optax.center, "read", loses_the_folder)
    with agn_optax.LocalCenter(RULE, params, durability=Journal(kept)) as center:
        center.write_snapshot()
        assert f"cannot write {to}" in fails("export", kept, to, code=1)


LOSES_ITS_FOLDER = """
import shutil
from orbax.checkpoint import v1
from agn_optax import cli

save = v1.save

def lose_and_save(to, params):
    shutil.rmtree(to.parent)
    to.parent.write_text("in the way")
    save(to, params)

v1.save = lose_and_save
cli.main()
"""


@pytest.mark.slow
def test_command_whose_save_failed_ends(tmp_path, params):
    """Without a directory Orbax leaves threads that wait for it."""
    kept, to = tmp_path / "kept", tmp_path / "folder/to"
    center = agn_optax.LocalCenter(RULE, params, durability=Journal(kept))
    center.close()
    arguments, environment = python("-c", LOSES_ITS_FOLDER, "export", kept, to, *AGN)
    result = subprocess.run(  # noqa: S603 our own program
        arguments,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert result.returncode == 1, result.stderr
    assert f"agn-optax: cannot write {to}: " in result.stderr


def test_export_of_a_running_center(tmp_path, params):
    reads, looks = "reader-0123456789", "observer-0123456789"
    access = service.Access(f"reader * {reads}\nobserver * {looks}".encode())
    to = tmp_path / "checkpoint"
    with service.serve(
        RULE, params, security=service.Security(access=access)
    ) as server:
        now = moved(server.center, params)
        (tmp_path / "token").write_text(looks)
        token = f"--token-file={tmp_path / 'token'}"
        output = fails("export", server.address, to, token, code=1)
        assert "Pull needs the role" in output
        (tmp_path / "token").write_text(reads)
        assert f"version 2 is in {to}" in succeeds("export", server.address, to, token)
        assert_identical(loaded(to), now.params)
        with service.Observer(server.address, token=reads) as observer:
            assert_identical(observer.pull().params, now.params)


@pytest.mark.slow
def test_export_of_a_running_sharded_center(tmp_path, params):
    with service.serve(RULE) as one, service.serve(RULE) as other:
        addresses = f"{one.address},{other.address}"
        with service.connect(addresses, RULE) as center:
            center.initialize(params, worker="chief")
            now = moved(center, params)
        to = tmp_path / "checkpoint"
        assert "needs its rule: give --rule" in fails("export", addresses, to, code=2)
        succeeds("export", addresses, to, *AGN)
        assert_identical(loaded(to), now.params)


def test_serve_saves_its_center_when_it_ends(tmp_path, params):
    to, address = tmp_path / "checkpoint", f"unix:{tmp_path}/center"
    seen = []

    def work(center):
        center.initialize(params, worker="anna")
        seen.append(moved(center, params))

    arguments = [*AGN, "--open", f"--save={to}"]
    result = serve(address, RULE, *arguments, then=work)
    assert f"version 2 is in {to}" in result.stderr
    assert_identical(loaded(to), seen[0].params)
    assert "exists already" in fails("serve", *arguments, code=2)


WORKER = """
import signal, sys, jax.numpy as jnp, optax, agn_optax
from agn_optax import service

me = service.environment()
center = service.connect(me.address, agn_optax.rules.downpour())
worker = agn_optax.Worker(center, optax.sgd(1.0), period=1000, name=me.worker)
params, state = worker.start({"w": jnp.zeros(3)}, chief=me.rank == 0)
for _ in range(5):
    updates, state = worker.tx.update({"w": jnp.ones(3)}, state, params)
    params = optax.apply_updates(params, updates)
    params, state = worker.exchange(params, state)  # the period is not full

def end(*_):
    worker.flush(params, state)
    sys.exit()

signal.signal(signal.SIGTERM, end)
print("ready", flush=True)
signal.pause()
"""


@pytest.mark.slow
def test_last_messages_of_workers_are_saved(tmp_path):
    """The launcher gets SIGTERM; its workers end first, then their center."""
    (tmp_path / "train.py").write_text(WORKER)
    to = tmp_path / "checkpoint"
    arguments, environment = python(
        *("-m", "agn_optax.ops.cli", "launch", "--workers=2", "--rule=downpour"),
        *(f"--save={to}", f"--stop-grace={PATIENCE}", tmp_path / "train.py"),
    )
    with subprocess.Popen(  # noqa: S603 our own program
        arguments, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            ready = 0
            while ready < 2:
                ready += "ready" in process.stdout.readline()
            process.send_signal(signal.SIGTERM)
            output = process.stdout.read()
        finally:
            process.kill()
    assert "version 2 is in" in output
    restored = loaded(to, {"w": jnp.zeros(3)})
    assert restored["w"].tolist() == [-10.0] * 3


def test_read_changes_no_file(tmp_path):
    kept = Snapshots(tmp_path / "kept", seconds=3600.0)
    center = agn_optax.LocalCenter(rules.downpour(), jnp.ones(2), durability=kept)
    center.write_snapshot()
    files = {each.name: each.read_bytes() for each in (tmp_path / "kept").iterdir()}
    found = read(tmp_path / "kept")
    assert (found.version, found.params.tolist()) == (0, [1.0, 1.0])
    assert files == {e.name: e.read_bytes() for e in (tmp_path / "kept").iterdir()}
    center.close()
