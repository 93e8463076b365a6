"""The lines of docs/levanter.md for some frameworks, run where these are installed.

`make frameworks` installs each framework in an environment of its own.
"""

import pathlib
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from helpers import support

import agn_optax

# The warnings are the frameworks' own.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "levanter.md"
X = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
PERIOD, STEPS = 10, 20


def installed(*modules):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [pytest.importorskip(module, exc_type=ImportError) for module in modules]


def run(framework, **names):
    """Run the page's lines for a framework, which use ``names``; return all names."""
    page = PAGE.read_text()
    (section,) = re.findall(rf"^## {framework}\n(.*?)(?=^## |\Z)", page, re.M | re.S)
    (lines,) = re.findall(r"^```text\n(.*?)^```", section, re.M | re.S)
    assert f"period={PERIOD}" in lines
    names |= {"agn_optax": agn_optax, "optax": optax}
    exec(compile(lines, f"docs/levanter.md, {framework}", "exec"), names)  # noqa: S102
    return names


def assert_adopted(params, center):
    """Check that the last step was an exchange, and that the center is a model's."""
    support.assert_close(
        jax.tree.leaves(params), jax.tree.leaves(center), tolerance=1e-6
    )


def test_tunix_trains_with_a_center_in_its_optimizer(tmp_path):
    (tunix,) = installed("tunix.sft.peft_trainer")

    def loss(model, x):
        return jnp.mean((model(x) - 1.0) ** 2)

    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    first = float(loss(model, X))
    found = run(
        "Tunix",
        PeftTrainer=tunix.PeftTrainer,
        model=model,
        config=tunix.TrainingConfig(max_steps=STEPS, eval_every_n_steps=100),
        loss=loss,
        inputs=lambda x: {"x": x},
        data=[X] * STEPS,
    )
    assert_adopted(nnx.state(model, nnx.Param), found["center"])
    assert float(loss(model, X)) < first


def test_kauldron_trains_with_a_center_in_its_optimizer(tmp_path):
    kd, nn = installed("kauldron.kd", "flax.linen")

    class Model(nn.Module):
        x: kd.kontext.Key = "batch.x"

        @nn.compact
        def __call__(self, x):
            return nn.Dense(1)(x)

    class Loss(kd.losses.Loss):
        preds: kd.kontext.Key = "preds"

        def get_values(self, preds):
            return jnp.mean((preds - 1.0) ** 2, axis=-1, keepdims=True)

    source = [{"x": row} for row in np.tile(X, (STEPS, 1))]
    data = kd.data.py.DataSource(
        data_source=source, shuffle=False, batch_size=8, num_workers=0
    )
    settings = {
        "train_ds": data,
        "model": Model(),
        "train_losses": {"loss": Loss()},
        "num_train_steps": STEPS - 1,  # the number of the last step, counted from 0
        "workdir": tmp_path,
        "checkpointer": kd.ckpts.NoopCheckpointer(),
    }
    found = run("kauldron", kd=kd, settings=settings)
    state = found["state"]
    assert_adopted(state.params, found["center"])
    assert int(state.opt_state.exchanges) == STEPS // PERIOD


def test_flax_model_of_transformers_trains_with_a_center_in_its_optimizer(tmp_path):
    (transformers,) = installed("transformers")
    if not hasattr(transformers, "FlaxBertForSequenceClassification"):
        pytest.skip("Transformers 5 has no Flax models")
    small = dict.fromkeys(("num_hidden_layers", "num_attention_heads"), 1)
    config = transformers.BertConfig(
        vocab_size=9, hidden_size=8, intermediate_size=8, **small
    )
    model = transformers.FlaxBertForSequenceClassification(config, input_shape=(1, 4))
    tokens, labels = jnp.arange(8).reshape(2, 4), jnp.array([0, 1])

    @jax.jit
    def step(state):
        def loss(params):
            logits = state.apply_fn(tokens, params=params).logits
            each = optax.softmax_cross_entropy_with_integer_labels
            return each(logits, labels).mean()

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    losses = []

    def train(state):
        for _ in range(STEPS):
            state, value = step(state)
            losses.append(float(value))
        return state

    found = run(
        "Flax models of Transformers",
        TrainState=TrainState,
        model=model,
        train=train,
        folder=tmp_path,
    )
    assert losses[-1] < losses[0]
    saved = type(model).from_pretrained(tmp_path).params
    assert_adopted(found["state"].params, saved)
