"""``--save``: checkpoints readable without agn_optax."""

import signal
import subprocess

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.commands import PATIENCE, fails, python, serve
from helpers.support import assert_identical
from orbax.checkpoint import v1 as ocp

from agn_optax import errors, rules, service
from agn_optax.center import Submission
from agn_optax.ops.cli import _save

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


@pytest.mark.parametrize(
    "where",
    ["file/to", "file/folder/to", pytest.param("folder/" + 240 * "n", id="long")],
)
def test_directory_that_cannot_be_made_is_found_before_anything_starts(tmp_path, where):
    to = tmp_path / where
    (tmp_path / "file").write_text("in the way")
    output = fails("serve", *AGN, f"--save={to}", code=2)
    assert "a checkpoint needs a directory that can be made" in output
    assert str(to) in output


def test_directory_that_can_be_made_is_not_left_behind(tmp_path):
    _save.check(tmp_path / "new/folder/to")
    assert list((tmp_path / "new/folder").iterdir()) == []


def test_orbax_is_not_called_where_no_directory_can_be_made(
    tmp_path, params, monkeypatch
):
    """Orbax's threads would wait for that directory, and the process for them."""
    monkeypatch.setattr(ocp, "save", lambda *_: pytest.fail("Orbax was called"))
    (tmp_path / "folder").write_text("in the way")
    with pytest.raises(errors.DurabilityError, match="cannot write"):
        _save.write(params, tmp_path / "folder/to")


LOSES_ITS_FOLDER = """
import shutil
from orbax.checkpoint import v1
from agn_optax.ops import cli

save = v1.save

def lose_and_save(to, params):
    shutil.rmtree(to.parent)
    to.parent.write_text("in the way")
    save(to, params)

v1.save = lose_and_save
cli.main()
"""


@pytest.mark.slow
def test_center_whose_save_failed_ends(tmp_path, unix_address, params):
    """Without a directory Orbax leaves threads that wait for it."""
    to, address = tmp_path / "folder/to", unix_address
    options = [*AGN, "--open", f"--address={address}", f"--save={to}"]
    arguments, environment = python("-c", LOSES_ITS_FOLDER, "serve", *options)
    with subprocess.Popen(  # noqa: S603 our own program
        arguments, env=environment, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            with service.connect(address, RULE, timeout=PATIENCE) as center:
                center.initialize(params, worker="anna")
            process.send_signal(signal.SIGTERM)
            _, output = process.communicate(timeout=PATIENCE)
        finally:
            process.kill()
    assert process.returncode == 1, output
    assert f"agn-optax: cannot write {to}: " in output


def test_serve_saves_its_center_when_it_ends(tmp_path, unix_address, params):
    to, address = tmp_path / "checkpoint", unix_address
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
