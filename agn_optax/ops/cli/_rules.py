"""Rules by their names and options."""

from __future__ import annotations

from agn_optax import rules
from agn_optax.ops.cli import _options
from agn_optax.rules import Rule


@_options.record(
    everyday=("rule", "center_optimizer", "learning_rate"),
    rules=", ".join(rules.RULES),
    codecs=", ".join(rules.CODECS),
    answers=", ".join(rules.DOWNLINK_DTYPES),
    combinations=", ".join(rules.COMBINE_METHODS),
    optimizers=", ".join(rules.CENTER_OPTIMIZERS),
)
class RuleOptions:
    """Options of the rule of a center.

    Rule:
      rule NAME: One of {rules}.
      rule_from MODULE:OBJECT: A rule of your own, or a function that takes no arguments
        and returns one; modules in the current directory are found.
      moving_rate: For easgd: alpha, in (0, 1].
      rho: For easgd: elastic penalty in the local gradients; 0 unless set.
      record_dtype DTYPE: For agn: dtype of the workers' gradient sum.
      codec NAME: Uplink compression of contributions: {codecs}. A float dtype also
        applies to the center's answers; any other codec adds its error to the next
        contribution.
      answers DTYPE: Dtype of the center's answers, to which the center is rounded:
        {answers}.
      combine NAME: How to combine the messages of a round, if not as the rule does:
        {combinations}. All but the first two need --mode synchronous. Bad messages are
        tolerated by median and krum (one bad message).

    Center optimizer:
      center_optimizer NAME: For agn, diloco and decoupled_diloco: one of
        {optimizers}.
      learning_rate: Learning rate of the center optimizer.
      momentum: For sgd, rmsprop, delayed_nesterov, heloco, isoloco,
        momentum_lookahead and ordered_momentum.
      nesterov: Nesterov's momentum, for sgd, rmsprop and adam.
      b1: Decay of the first moment.
      b2: Decay of the second moment.
      eps: Term added to denominators.
      decay: For rmsprop: decay of the second moment.
      weight_decay: For adamw, lamb, lion and nadamw.
      delay: For delayed_nesterov: messages between two changes of its momentum, usually
        the number of workers.
      messages: For heloco and ordered_momentum: messages of a round, usually the number
        of workers.
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
    """Return the rule that the options describe.

    Raises:
      InvalidArgumentError: the options name no rule, or one of them is missing, out of
        range, or does not apply to the rule or optimizer.
    """
    return rules.rule_from_settings(_options.given(options), _options.option)


def is_given(options: RuleOptions) -> bool:
    """Return whether the options name a rule."""
    return options.rule is not None or options.rule_from is not None
