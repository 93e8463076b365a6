"""Rules and center optimizers from their names and options."""

from __future__ import annotations

import importlib
import inspect
import math
import operator
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import optax

from agn_optax import errors, rules
from agn_optax._internal import check
from agn_optax.cli import _options
from agn_optax.rules import Rule, codecs

# Of optax. Their signatures say which options they have.
_OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    name: getattr(optax, name)
    for name in (
        *("adabelief", "adagrad", "adam", "adamw", "lamb", "lion"),
        *("nadam", "nadamw", "rmsprop", "sgd", "yogi"),
    )
}
_RULES: dict[str, Callable[..., Rule]] = {
    name: getattr(rules, name) for name in rules.__all__ if name != "Rule"
}
_CODECS = {
    **{name: codecs.cast(name) for name in ("bfloat16", "float16")},
    **{
        f"int{bits}": codecs.error_feedback(codecs.quantize(bits)) for bits in (8, 4, 2)
    },
}
# What an option may be at most; 0 is the least.
_HIGHEST = {
    **dict.fromkeys(("learning_rate", "eps", "weight_decay"), math.inf),
    **dict.fromkeys(("momentum", "b1", "b2", "decay"), 1.0),
}
_OF_OPTIMIZER = (*_HIGHEST, "nesterov")


@_options.record(
    rules=", ".join(_RULES),
    codecs=", ".join(_CODECS),
    optimizers=", ".join(_OPTIMIZERS),
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
      codec NAME: How contributions travel: {codecs}. A float, the center too; what an
        int loses goes into the next contribution.

    Center optimizer:
      center_optimizer NAME: Of agn and diloco: one of {optimizers}.
      learning_rate: Its learning rate.
      momentum: Of sgd and rmsprop.
      nesterov: Nesterov's momentum, of sgd, rmsprop and adam.
      b1: Decay of the first moment.
      b2: Decay of the second moment.
      eps: Added to denominators.
      decay: Of rmsprop.
      weight_decay: Of adamw, lamb, lion and nadamw.
    """

    rule: str | None = None
    rule_from: str | None = None
    moving_rate: float | None = None
    rho: float | None = None
    record_dtype: str | None = None
    codec: str | None = None
    center_optimizer: str | None = None
    learning_rate: float | None = None
    momentum: float | None = None
    nesterov: bool | None = None
    b1: float | None = None
    b2: float | None = None
    eps: float | None = None
    decay: float | None = None
    weight_decay: float | None = None


def make(options: RuleOptions) -> Rule:
    """The rule that the options say.

    Raises:
      InvalidArgumentError: they name none, or an option is missing, out of range or not
        one of this rule or optimizer.
    """
    if options.rule_from is not None:
        _options.refuse(
            options,
            "does not go with --rule-from: the object has all settings",
            but=("rule_from",),
        )
        return _load(options.rule_from)
    if options.rule is None:
        raise errors.InvalidArgumentError(
            f"no rule: give --rule NAME ({', '.join(_RULES)}), or --rule-from "
            "MODULE:OBJECT, on the command line or in a file with --config"
        )
    factory = _options.choose(options.rule, _RULES, "--rule")
    settings = _settings(options, factory, f"rule {options.rule}")
    center = inspect.signature(factory).parameters.get("center")
    of_center = ("center_optimizer", *_OF_OPTIMIZER) if center else ()
    does_not_apply = f"does not apply to rule {options.rule}"
    _options.refuse(options, does_not_apply, but=("rule", *settings, *of_center))
    if options.center_optimizer is not None:
        settings["center"] = _optimizer(options)
    elif center and center.default is center.empty:
        raise errors.InvalidArgumentError(
            f"rule {options.rule} needs --center-optimizer, one of "
            f"{', '.join(_OPTIMIZERS)}"
        )
    else:
        _options.refuse(options, "needs --center-optimizer", only=_OF_OPTIMIZER)
    settings["codec"] = codec(options)
    return factory(**settings)


def codec(options: RuleOptions) -> codecs.Codec:
    """How contributions travel.

    Raises:
      InvalidArgumentError: there is no codec of that name.
    """
    if options.codec is None:
        return codecs.identity()
    return _options.choose(options.codec, _CODECS, "--codec")


def inner(name: str) -> optax.GradientTransformation:
    """An optimizer by its name, for the sizes of its state.

    Raises:
      InvalidArgumentError: none of ours has that name.
    """
    return _options.choose(name, _OPTIMIZERS, "--inner")(1e-3)


def is_given(options: RuleOptions) -> bool:
    """Whether they name a rule."""
    return options.rule is not None or options.rule_from is not None


def _optimizer(options: RuleOptions) -> optax.GradientTransformation:
    name = options.center_optimizer
    factory = _options.choose(name, _OPTIMIZERS, "--center-optimizer")
    settings = _settings(options, factory, f"center optimizer {name}")
    _options.refuse(
        options,
        f"does not apply to center optimizer {name}, which has "
        f"{', '.join(map(_options.option, _known(factory)))}",
        only=set(_OF_OPTIMIZER) - set(settings),
    )
    for each, high in _HIGHEST.items():
        if each in settings:
            check.rate(settings[each], _options.option(each), low=0.0, high=high)
    return factory(**settings)


def _settings(
    options: RuleOptions, factory: Callable[..., Any], what: str
) -> dict[str, Any]:
    """The arguments of a factory that were given."""
    given = _options.given(options)
    known = _known(factory)
    for name, parameter in known.items():
        if name not in given and parameter.default is parameter.empty:
            raise errors.InvalidArgumentError(f"{what} needs {_options.option(name)}")
    return {name: given[name] for name in known if name in given}


def _known(factory: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Its parameters that are options."""
    return {
        name: parameter
        for name, parameter in inspect.signature(factory).parameters.items()
        if name in RuleOptions.__dataclass_fields__
    }


def _load(name: str) -> Rule:
    module, _, path = name.partition(":")
    if not (module and path):
        raise errors.InvalidArgumentError(
            f'--rule-from must be "module:object", got {name!r}'
        )
    here = str(pathlib.Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found = operator.attrgetter(path)(importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        raise errors.InvalidArgumentError(
            f"--rule-from {name}: {error} (looked for in {here} as well)"
        ) from error
    made = found if isinstance(found, Rule) or not callable(found) else found()
    if not isinstance(made, Rule):
        raise errors.InvalidTypeError(
            f"--rule-from {name} must be an agn_optax.rules.Rule, or a function "
            f"without arguments that returns one, got {check.show(made)}"
        )
    return made
