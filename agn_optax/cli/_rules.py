"""Rules and center optimizers from their names and options."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import math
import pathlib
import sys
from collections.abc import Callable
from typing import Annotated, Any

import optax
import typer

from agn_optax import errors, rules
from agn_optax._internal import check
from agn_optax.cli import _options
from agn_optax.rules import Rule, codecs

_RULE = "Rule"
_OPTIMIZER = "Center optimizer"

# Of optax. Their signatures say which options they have.
_OPTIMIZERS = (
    "adabelief",
    "adagrad",
    "adam",
    "adamw",
    "lamb",
    "lion",
    "nadam",
    "nadamw",
    "rmsprop",
    "sgd",
    "yogi",
)
_NAMES = tuple(name for name in rules.__all__ if name != "Rule")
_CODECS = {
    **{name: functools.partial(codecs.cast, name) for name in ("bfloat16", "float16")},
    **{
        f"int{bits}": functools.partial(
            lambda bits: codecs.error_feedback(codecs.quantize(bits)), bits
        )
        for bits in (8, 4, 2)
    },
}
# What an option may be.
_RANGES = {
    "learning_rate": (0.0, math.inf),
    "momentum": (0.0, 1.0),
    "b1": (0.0, 1.0),
    "b2": (0.0, 1.0),
    "decay": (0.0, 1.0),
    "eps": (0.0, math.inf),
    "weight_decay": (0.0, math.inf),
}
_OF_OPTIMIZER = (*_RANGES, "nesterov")


def _of_rule(help_: str, metavar: str | None = None) -> Any:
    return typer.Option(help=help_, metavar=metavar, rich_help_panel=_RULE)


def _of_optimizer(help_: str, metavar: str | None = None) -> Any:
    return typer.Option(help=help_, metavar=metavar, rich_help_panel=_OPTIMIZER)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RuleOptions:
    """Which rule a center runs."""

    rule: Annotated[str | None, _of_rule(f"One of {', '.join(_NAMES)}.", "NAME")] = None
    rule_from: Annotated[
        str | None,
        _of_rule(
            "A rule of your own, or a function without arguments that returns it; "
            "modules in the current directory are found.",
            "MODULE:OBJECT",
        ),
    ] = None
    moving_rate: Annotated[float | None, _of_rule("Of easgd: alpha, in (0, 1].")] = None
    rho: Annotated[
        float | None,
        _of_rule("Of easgd: the elastic penalty in the local gradients; 0 unless set."),
    ] = None
    record_dtype: Annotated[
        str | None, _of_rule("Of agn: dtype of the workers' gradient sum.", "DTYPE")
    ] = None
    codec: Annotated[
        str | None,
        _of_rule(
            f"How contributions travel: {', '.join(_CODECS)}. A float, the center "
            "too; what an int loses goes into the next contribution.",
            "NAME",
        ),
    ] = None
    center_optimizer: Annotated[
        str | None,
        _of_optimizer(f"Of agn and diloco: one of {', '.join(_OPTIMIZERS)}.", "NAME"),
    ] = None
    learning_rate: Annotated[float | None, _of_optimizer("Its learning rate.")] = None
    momentum: Annotated[float | None, _of_optimizer("Of sgd and rmsprop.")] = None
    nesterov: Annotated[
        bool | None, _of_optimizer("Nesterov's momentum, of sgd, rmsprop and adam.")
    ] = None
    b1: Annotated[float | None, _of_optimizer("Decay of the first moment.")] = None
    b2: Annotated[float | None, _of_optimizer("Decay of the second moment.")] = None
    eps: Annotated[float | None, _of_optimizer("Added to denominators.")] = None
    decay: Annotated[float | None, _of_optimizer("Of rmsprop.")] = None
    weight_decay: Annotated[
        float | None, _of_optimizer("Of adamw, lamb, lion and nadamw.")
    ] = None


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
            f"no rule: give --rule NAME ({', '.join(_NAMES)}), or --rule-from "
            "MODULE:OBJECT, on the command line or in a file with --config"
        )
    if options.rule not in _NAMES:
        raise errors.InvalidArgumentError(
            f"--rule must be one of {', '.join(_NAMES)}, got {options.rule!r}"
        )
    factory = getattr(rules, options.rule)
    own = _settings(options, factory, f"rule {options.rule}")
    does_not_apply = f"does not apply to rule {options.rule}"
    _options.refuse(
        options,
        does_not_apply,
        but=("rule", "center_optimizer", *own, *_OF_OPTIMIZER),
    )
    settings: dict[str, Any] = {name: getattr(options, name) for name in own}
    if "center" not in inspect.signature(factory).parameters:
        _options.refuse(options, does_not_apply, but=("rule", *own))
    elif options.center_optimizer is not None:
        settings["center"] = _optimizer(options)
    elif _is_required(factory, "center"):
        raise errors.InvalidArgumentError(
            f"rule {options.rule} needs --center-optimizer, one of "
            f"{', '.join(_OPTIMIZERS)}"
        )
    else:
        _options.refuse(options, "needs --center-optimizer", but=("rule", *own))
    if options.codec is not None:
        settings["codec"] = codec(options.codec)
    return factory(**settings)


def codec(name: str) -> codecs.Codec:
    """A codec by its name.

    Raises:
      InvalidArgumentError: none of ours has that name.
    """
    if name not in _CODECS:
        raise errors.InvalidArgumentError(
            f"--codec must be one of {', '.join(_CODECS)}, got {name!r}"
        )
    return _CODECS[name]()


def inner(name: str) -> optax.GradientTransformation:
    """An optimizer by its name, for the sizes of its state.

    Raises:
      InvalidArgumentError: none of ours has that name.
    """
    return _optimizer_factory(name, "--inner")(1e-3)


def is_given(options: RuleOptions) -> bool:
    """Whether they name a rule."""
    return options.rule is not None or options.rule_from is not None


def _optimizer(options: RuleOptions) -> optax.GradientTransformation:
    name = options.center_optimizer
    factory = _optimizer_factory(name, "--center-optimizer")
    own = _settings(options, factory, f"center optimizer {name}")
    for field in _options.given(options):
        if field in _OF_OPTIMIZER and field not in own:
            raise errors.InvalidArgumentError(
                f"{_options.option(field)} does not apply to center optimizer {name}, "
                f"which has {', '.join(map(_options.option, _known(factory)))}"
            )
    settings = {each: getattr(options, each) for each in own}
    for each, (low, high) in _RANGES.items():
        if each in settings:
            check.rate(settings[each], _options.option(each), low=low, high=high)
    return factory(**settings)


def _optimizer_factory(name: str | None, what: str) -> Callable[..., Any]:
    if name not in _OPTIMIZERS:
        raise errors.InvalidArgumentError(
            f"{what} must be one of {', '.join(_OPTIMIZERS)}, got {name!r}"
        )
    return getattr(optax, name)


def _settings(
    options: RuleOptions, factory: Callable[..., Any], what: str
) -> list[str]:
    """The options of a factory that were given."""
    given = _options.given(options)
    for name in _known(factory):
        if name not in given and _is_required(factory, name):
            raise errors.InvalidArgumentError(f"{what} needs {_options.option(name)}")
    return [name for name in _known(factory) if name in given]


def _known(factory: Callable[..., Any]) -> list[str]:
    fields = {field.name for field in dataclasses.fields(RuleOptions)}
    return [name for name in inspect.signature(factory).parameters if name in fields]


def _is_required(factory: Callable[..., Any], name: str) -> bool:
    parameter = inspect.signature(factory).parameters[name]
    return parameter.default is inspect.Parameter.empty


def _load(name: str) -> Rule:
    module_name, colon, path = name.partition(":")
    if not (module_name and colon and path):
        raise errors.InvalidArgumentError(
            f'--rule-from must be "module:object", got {name!r}'
        )
    here = str(pathlib.Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module_name)
        for attribute in path.split("."):
            found = getattr(found, attribute)
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
