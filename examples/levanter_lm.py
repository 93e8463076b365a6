"""A language model in Levanter's trainer: with a center inside, or with a served one.

docs/levanter.md has the commands, and the versions that it was run with.
"""

import dataclasses
import functools
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import levanter
import numpy as np
from levanter.models import llama, lm_model
from levanter.optim import AdamConfig, OptimizerConfig

import agn_optax
from agn_optax import service


@OptimizerConfig.register_subclass("agn_optax")
@dataclasses.dataclass(frozen=True)
class AgnOptaxConfig(AdamConfig):
    """Levanter's Adam within a rule of agn_optax, with the center in the optimizer."""

    rule: str = "diloco"  # or agn, easgd, ...
    period: int = 10  # local steps between exchanges

    def build(self, num_train_steps: int) -> Any:
        """Return the optimizer."""
        inner = super().build(num_train_steps)
        return getattr(agn_optax, self.rule)(inner, period=self.period)


@dataclasses.dataclass
class WorkerHook(levanter.callbacks.Callback):
    """A hook of a trainer that exchanges the trained parameters with a center."""

    worker: agn_optax.Worker

    def start(self, state: Any, chief: bool) -> Any:
        """Adopt the center, but keep the state of the inner optimizer."""
        params, local = self.worker.start(state.trainable_model, chief=chief)
        local = local._replace(inner_state=state.opt_state.inner_state)
        return self._replace(state, params, local)

    def on_step(self, info: Any, force: bool = False) -> None:
        """Exchange if the period is full, and after the last step, which is forced."""
        call = self.worker.flush if force else self.worker.exchange
        exchanged = call(info.state.trainable_model, info.state.opt_state)
        info.state = self._replace(info.state, *exchanged)

    def _replace(self, state: Any, params: Any, local: Any) -> Any:
        model = eqx.combine(params, state.model)  # with the parts that are not trained
        return dataclasses.replace(state, model=model, opt_state=local)


@dataclasses.dataclass
class Config:
    """The settings of a run, from levanter_lm.yaml and the command line."""

    trainer: levanter.trainer.TrainerConfig
    model: llama.LlamaConfig
    optimizer: OptimizerConfig
    period: int | None = None  # of a worker with a served center


def train(config: Config, optimizer: Any, hook: Any = None, rank: int = 0) -> Any:
    vocabulary, key = hax.Axis("vocab", 64), jax.random.PRNGKey(0)
    rows = np.arange(32) * (np.arange(480)[:, None] % 7 + 1) + rank  # to be learned
    data = [lm_model.LmExample.causal(hax.named(x % 64, "position")) for x in rows]
    # The trainer takes the mean. Levanter's mean with a mask does not run on JAX 0.10.
    loss = functools.partial(lm_model.compute_next_token_loss, reduction=None)
    with levanter.trainer.Trainer(config.trainer, optimizer, loss) as trainer:
        model = functools.partial(config.model.build, vocabulary, key=key)
        state = trainer.initial_state(key, model_init=model)
        if hook is not None:
            state = hook.start(state, chief=rank == 0)
            trainer.add_hook(hook)
        loader = trainer.data_loader(levanter.data.ListAsyncDataset(data, True))
        return trainer.train(state, loader.iter_from_step(int(state.step)))


def main(config: Config) -> None:
    levanter.initialize(config)
    inner = config.optimizer.build(config.trainer.num_train_steps)
    if config.period is None:
        info = train(config, inner)
    else:
        me = service.environment()
        center = service.connect(me.address, me.rule)
        worker = agn_optax.Worker(center, inner, period=config.period, name=me.worker)
        with center, worker:
            info = train(config, worker.tx, WorkerHook(worker), me.rank)
    print(f"loss {info.loss:.3f} after {info.next_step} steps")


if __name__ == "__main__":
    levanter.config.main(main)()
