"""Rules and center optimizers from their names and options."""

from __future__ import annotations

import optax

from agn_optax import rules
from agn_optax._internal import check
from agn_optax.ops.cli import _options
from agn_optax.rules import Rule, codecs


@_options.record(
    rules=", ".join(rules.RULES),
    codecs=", ".join(rules.CODECS),
    answers=", ".join(rules.ANSWERS),
    combinations=", ".join(rules.COMBINATIONS),
    optimizers=", ".join(rules.CENTER_OPTIMIZERS),
)
class RuleOptions:
    """Which rule a center runs.

    Rule:
      rule NAME: One of {rules}.
      rule_from MODULE:OBJECT: A rule of your own, or a function without arguments that
        returns it; modules in the current directory are found.
      moving_rate: Of easgd: alpha, in (0, 1].
      rho: Of easgd: the elastic penalty in the local gradients; 0 unless set.
      record_dtype DTYPE: Of agn: dtype of the workers' gradient sum.
      codec NAME: How contributions travel: {codecs}. A float, the center too; what any
        other loses goes into the next contribution.
      answers NAME: How the center travels back: {answers}. A float rounds it; by any
        other, workers hear of differences.
      combine NAME: How the messages of a round become one, if not as the rule says:
        {combinations}. All but the first two need --mode synchronous; median,
        trimmed_mean (of a quarter) and krum (of one) stand bad messages.

    Center optimizer:
      center_optimizer NAME: Of agn and diloco: one of {optimizers}.
      learning_rate: Its learning rate.
      momentum: Of sgd, rmsprop and those that wait for nobody.
      nesterov: Nesterov's momentum, of sgd, rmsprop and adam.
      b1: Decay of the first moment.
      b2: Decay of the second moment.
      eps: Added to denominators.
      decay: Of rmsprop.
      weight_decay: Of adamw, lamb, lion and nadamw.
      delay: Of delayed_nesterov: messages between two changes of its momentum, as many
        as there are workers.
      messages: Of heloco and ordered_momentum: messages of a round, as many as there
        are workers.
    """

    rule: str | None = None
    rule_from: str | None = None
    moving_rate: float | None = None
    rho: float | None = None
    record_dtype: str | None = None
    codec: str | None = None
    answers: str | None = None
    combine: str | None = None
    center_optimizer: str | None = None
    learning_rate: float | None = None
    momentum: float | None = None
    nesterov: bool | None = None
    b1: float | None = None
    b2: float | None = None
    eps: float | None = None
    decay: float | None = None
    weight_decay: float | None = None
    delay: int | None = None
    messages: int | None = None


def make(options: RuleOptions) -> Rule:
    """The rule that the options say.

    Raises:
      InvalidArgumentError: they name none, or an option is missing, out of range or not
        one of this rule or optimizer.
    """
    return rules.named(_options.given(options), _options.option)


def codec(options: RuleOptions) -> codecs.Codec:
    """How contributions travel, and the center back.

    Raises:
      InvalidArgumentError: there is no codec of that name.
    """
    return rules.named_codec(_options.given(options), _options.option)


def inner(name: str) -> optax.GradientTransformation:
    """An optimizer by its name, for the sizes of its state.

    Raises:
      InvalidArgumentError: none of ours has that name.
    """
    return check.choose(name, rules.OPTIMIZERS, "--inner")(1e-3)


def is_given(options: RuleOptions) -> bool:
    """Whether they name a rule."""
    return options.rule is not None or options.rule_from is not None
