"""Levanter's trainer with agn_optax in its optimizer, and with a worker in a hook.

These tests run where Levanter is installed (docs/levanter.md).
"""

import importlib.util
import pathlib
import re
import warnings

import jax
import numpy as np
import optax
import pytest
from helpers import commands, support, waiting

import agn_optax
from agn_optax import service

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Levanter's own, as below
    pytest.importorskip("levanter")
    import draccus
    import haliax
    import levanter

    PROGRAM = pathlib.Path(__file__).parents[2] / "examples" / "levanter_lm.py"
    spec = importlib.util.spec_from_file_location("levanter_lm", PROGRAM)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(900),
]
YAML = PROGRAM.with_suffix(".yaml")


def configured(folder, steps, *arguments):
    """Return the program's settings; each fifth step writes a checkpoint."""
    trainer = {
        "id": "run",
        "num_train_steps": steps,
        "log_dir": folder,
        "checkpointer.base_path": folder / "checkpoints",
        "checkpointer.keep": "[{every: 5}]",
    }
    pairs = [f"--trainer.{name}={value}" for name, value in trainer.items()]
    return draccus.parse(example.Config, YAML, [*pairs, *arguments])


def arrays(tree):
    return jax.tree.map(np.asarray, jax.tree.leaves(tree))


def test_drop_in_form_is_diloco_around_the_optimizer_of_levanter(tmp_path):
    period = ["--optimizer.type=agn_optax", "--optimizer.period=5"]
    config = configured(tmp_path / "diloco", 5, *period)
    state = example.train(config, config.optimizer.build(5)).state
    plain = configured(tmp_path / "adam", 5)
    adam = example.train(plain, plain.optimizer.build(5)).state.trainable_model
    vocabulary = haliax.Axis("vocab", 64)
    first = arrays(plain.model.build(vocabulary, key=jax.random.PRNGKey(0)))
    outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
    moved = jax.tree.map(np.subtract, first, arrays(adam))
    updates, _ = outer.update(moved, outer.init(first))
    expected = arrays(optax.apply_updates(first, updates))
    center = arrays(agn_optax.center_params(state.opt_state))
    support.assert_close(center, expected, tolerance=1e-5)
    support.assert_close(arrays(state.trainable_model), center, tolerance=1e-6)


class Recorded(example.WorkerHook):
    """The hook of the example, which remembers the state that it starts with."""

    def start(self, state, chief):
        state = super().start(state, chief=chief)
        self.first = arrays(state.trainable_model)
        self.steps = int(state.step), int(state.opt_state.inner_state.count)
        return state


def test_preempted_worker_goes_on_from_the_center_with_its_own_moments(tmp_path):
    rule = agn_optax.rules.agn(optax.adam(1e-2))

    def trained(steps, chief):
        config = configured(tmp_path, steps)
        inner = config.optimizer.build(20)
        with (
            service.connect(server.address, rule) as center,
            agn_optax.Worker(center, inner, period=5, name="worker-0") as worker,
        ):
            hook = Recorded(worker)
            state = example.train(config, worker.tx, hook, rank=int(not chief)).state
            found = arrays(center.pull().params)
            support.assert_identical(arrays(state.trainable_model), found)
            assert "learning_rate" in state.opt_state.inner_state.hyperparams
            return hook, found, worker.exchanges

    with service.serve(rule, address="127.0.0.1:0") as server:
        hook, center, exchanges = trained(12, chief=True)
        assert (hook.steps, exchanges) == ((0, 0), 3)  # the last has two steps
        saved = levanter.checkpoint.discover_latest_checkpoint
        path = str(tmp_path / "checkpoints" / "run")
        waiting.wait_until(lambda: str(saved(path)).endswith("step-10"))

        hook, _, exchanges = trained(20, chief=False)
        support.assert_identical(hook.first, center)  # not the checkpoint's parameters
        assert hook.steps[0] == hook.steps[1] > 0  # the checkpoint's moments
        assert exchanges == 2
        assert server.center.version == 5


def test_workers_with_four_devices_each_meet_and_learn(tmp_path):
    launch = ["-m", "agn_optax.ops.cli", "launch", "--workers=2", "--rule=diloco"]
    program = ["--mode=synchronous", PROGRAM, "--config", YAML, "--period=10"]
    output = commands.printed(tmp_path, *launch, *program, JAX_NUM_CPU_DEVICES="4")
    found = re.findall(r"loss ([0-9.]+) after 60 steps", output)
    assert len(found) == 2, output
    assert all(float(loss) < 1.0 for loss in found)  # by chance: 4.2
