"""The command itself: help, exit codes, records of options."""

import dataclasses
import os
import pathlib
import re
from typing import Literal

import pytest
import typer
from helpers.commands import command, fails, succeeds

from agn_optax import __version__, errors
from agn_optax.ops.cli import _app, _options, _status
from agn_optax.ops.cli._center_options import CenterOptions
from agn_optax.ops.cli._rules import RuleOptions
from agn_optax.ops.engines import _run


def test_version_and_list_of_commands_are_printed():
    assert __version__ in succeeds("--version")
    output = succeeds("--help")
    names = "serve status watch drain doctor plan keys launch"
    for name in names.split():
        assert f" {name} " in output


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("serve", ["--rule-from", "--quorum", "--tls-client-ca"]),
        ("drain", ["ADDRESS", "--tls-ca", "--token-file"]),
        ("status", ["ADDRESS", "--tls-ca", "--timeout"]),
        ("watch", ["ADDRESS", "--interval", "--count", "--insecure"]),
        ("doctor", ["ADDRESS", "--rule", "--moving-rate", "--config"]),
        ("keys", ["DIRECTORY", "--host", "--chief", "--worker", "--operator"]),
        ("plan", ["--parameters", "--step-time", "--bandwidth", "--workers", "--rho"]),
        ("launch", ["PROGRAM.py", "--workers", "--restarts", "--center-optimizer"]),
    ],
)
def test_help_of_every_command_lists_its_options(name, options):
    output = succeeds(name, "--help")
    for option in (*options, "--json", "--help"):
        assert option in output


APP = typer.main.get_command(_app.app)


def flags(command):
    with command.make_context("agn-optax", [], resilient_parsing=True) as ctx:
        return [each for each in command.get_params(ctx) if getattr(each, "is_flag", 0)]


def test_no_option_has_its_own_name_as_its_value():
    """Typer 0.27 then writes the option's name like the value: ``--MODE``."""
    for name, subcommand in APP.commands.items():
        for param in subcommand.params:
            is_argument = param.param_type_name == "argument"
            assert is_argument or (param.metavar or "").lower() != param.name, name


@pytest.mark.few(3)
@pytest.mark.parametrize("name", ["", *APP.commands])
def test_flags_take_no_value(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")  # or long names are folded
    output = succeeds(*name.split(), "--help")
    assert not re.search("<bool>|BOOL", output, re.IGNORECASE)
    for each in flags(APP.commands[name] if name else APP):
        assert all(option in output for option in (*each.opts, *each.secondary_opts))
        # Only spaces between the last name of a flag and its help.
        last = (each.opts + each.secondary_opts)[-1]
        assert re.search(rf"{last} {{2,}}{each.help.split()[0]}", output), output


def test_flags_that_a_file_can_set_have_a_negative_form():
    """For instance, ``--no-page`` overrides ``page = true`` in a file."""
    denied = {
        option.removeprefix("--no-").replace("-", "_"): command
        for command in APP.commands.values()
        for each in flags(command)
        for option in each.secondary_opts
    }
    for kind in (RuleOptions, CenterOptions):
        for field in dataclasses.fields(kind):
            if "bool" in str(field.type):
                assert field.name in denied
    assert {"page", "direct", "nesterov", "open", "insecure"} <= denied.keys()
    made = []

    def take(center: CenterOptions) -> None:
        made.append(center.page)

    app = _app_of(take)
    for flag in ("--page", "--no-page"):
        app([flag], standalone_mode=False)
    assert made == [True, False]
    assert _options.parse_table({"page": True}, "a file", CenterOptions) == {
        "page": True
    }


@pytest.mark.parametrize(("name", "extra"), [("serve", "flax"), ("keys", "keys")])
def test_help_names_the_extra_that_is_needed(name, extra):
    output = " ".join(succeeds(name, "--help").replace("\u2502", " ").split())
    assert f"eeds the extra {extra}." in output


@pytest.mark.parametrize(
    "arguments",
    [["bake"], ["serve", "--speed=3"], ["serve", "--lease=x"], ["status"], ["plan"]],
)
def test_wrong_usage_shows_the_usage(arguments):
    assert "Usage:" in fails(*arguments, code=2)


def test_no_arguments_show_help():
    assert "Usage:" in command().output


def test_record_round_trips_through_the_command_line():
    rule = RuleOptions(rule="agn", nesterov=False, b1=-0.5, momentum=1e-30)
    arguments = _run.arguments(_options.given(rule))
    assert "--no-nesterov" in arguments
    made = {}

    def take(rule: RuleOptions, center: CenterOptions) -> None:
        made.update(rule=rule, center=center)

    app = _app_of(take)
    app([*arguments, "--insecure"], standalone_mode=False)
    assert made["rule"] == rule
    assert made["center"] == CenterOptions(insecure=True)
    app([], standalone_mode=False)
    assert made == {"rule": RuleOptions(), "center": CenterOptions()}


def _app_of(function):
    app = typer.Typer()
    app.command()(_options.as_command(function))
    return app


def test_options_are_optional_and_their_names_unique():
    names = []
    for record in (RuleOptions, CenterOptions):
        assert _options.given(record()) == {}
        names += [field.name for field in dataclasses.fields(record)]
    assert len(set(names)) == len(names)
    assert dataclasses.fields(_status.Reached)


def test_every_field_has_a_help_text():
    for record in (RuleOptions, CenterOptions, _status.Reached):
        names = [field.name for field in dataclasses.fields(record)]
        assert list(record.__options__) == names
        assert all(option.help for option in record.__options__.values())


def test_docstring_gives_the_help_of_options():
    @_options.record(kinds="a, b")
    class Record:
        """Test settings.

        Panel:
          kind NAME [a]: One of {kinds}, with a help that is
            longer than a line.
          quick: How: at once.
        """

        kind: str | None = None
        quick: bool | None = None
        count: int

    kind, quick, count = Record.__options__.values()
    assert (kind.metavar, kind.show_default) == ("NAME", "a")
    assert kind.help == "One of a, b, with a help that is longer than a line."
    assert kind.rich_help_panel == quick.rich_help_panel == "Panel"
    assert quick.help == "How: at once."
    assert (count.default, count.help) == (..., None)


def test_docstring_entry_without_a_field_is_rejected():
    with pytest.raises(AssertionError, match="speed"):

        @_options.record()
        class Record:
            """Test settings.

            Panel:
              speed: No field has this name.
            """


@dataclasses.dataclass(kw_only=True)
class Base:
    """A base class with an argument of its own.

    Args:
      size: size in `bytes`, whose description is longer than a
        line; None for any size. It may be 0.
    """

    size: int | None = None


@dataclasses.dataclass(kw_only=True)
class Source(Base):
    """A class whose arguments become options.

    Args:
      folder: where it is. The rest is no help.
      rate: number in a second. None for no limit.
      kind: one of two.
      is_fast: be fast.
      is_safe: be safe.
      inner: what no text can give.
    """

    folder: str | os.PathLike[str]
    rate: float | None = 20.0
    kind: Literal["a", "b"] = "a"
    is_fast: bool = False
    is_safe: bool = True
    inner: Base | None = None


GROUP = _options.Group(
    Source,
    prefix="my_",
    names={"folder": "folder DIRECTORY", "size": "size [much]"},
    needs="--folder",
)


@_options.record(groups={"source": GROUP})
class Grouped:
    """A record with a group.

    First:
      kind: Another one.

    Second:
      *source
      last: The last one.
    """

    kind: int | None = None
    last: int | None = None


def test_group_takes_types_defaults_and_help_from_the_library():
    options = Grouped.__options__
    names = ["kind", "size", "folder", "my_rate", "my_kind", "my_is_fast", "my_is_safe"]
    assert list(options) == [*names, "last"]
    assert [field.name for field in dataclasses.fields(Grouped)] == list(options)
    assert _options.given(Grouped()) == {}
    shown = {
        name: (each.help, each.metavar, each.show_default, each.rich_help_panel)
        for name, each in options.items()
        if name in GROUP.names.values()
    }
    assert shown == {
        "size": (
            "With --folder: size in bytes, whose description is longer than a line.",
            None,
            "much",
            "Second",
        ),
        "folder": ("Where it is.", "DIRECTORY", False, "Second"),
        "my_rate": ("With --folder: number in a second.", None, "20", "Second"),
        "my_kind": ("With --folder: one of two.", "a|b", "a", "Second"),
        "my_is_fast": ("With --folder: be fast.", None, False, "Second"),
        "my_is_safe": ("With --folder: be safe.", None, "my-is-safe", "Second"),
    }


def test_clause_on_none_is_shown_as_the_default():
    (_, option), *_ = _options.Group(Base).fields.values()
    assert option["show_default"] == "any size"


def test_group_builds_its_class_from_options():
    made = []

    def take(options: Grouped) -> None:
        made.append((options, GROUP.given(options)))

    app = _app_of(take)
    app(["--folder=a", "--my-rate=3", "--no-my-is-safe"], standalone_mode=False)
    options, arguments = made[0]
    assert arguments == {"folder": pathlib.Path("a"), "rate": 3.0, "is_safe": False}
    assert GROUP.build(options, size=3) == Source(**arguments, size=3)
    with pytest.raises(errors.InvalidArgumentError, match=r"^--my-rate needs --folder"):
        GROUP.build_if_given("folder", Grouped(my_rate=1.0))
    with pytest.raises(errors.InvalidArgumentError, match=r"^--my-kind is too much"):
        GROUP.reject(Grouped(my_kind="b"), "is too much")
    GROUP.reject(Grouped(kind=1), "is too much")
    assert GROUP.build_if_given("folder", Grouped(kind=1)) is None
    assert GROUP.build_if_given("folder", options) == Source(**arguments)


def test_everyday_options_come_first():
    shown = [
        (option.rich_help_panel, name)
        for record in (RuleOptions, CenterOptions)
        for name, option in record.__options__.items()
    ]
    rule = ["rule", "center_optimizer", "learning_rate"]
    center = ["address", "journal", "save", "mode", "tokens", "page"]
    assert [name for panel, name in shown if panel == "Options"] == [*rule, *center]
    panels = ["Rule", "Center optimizer", "Center", "Durability", "Mode", "Access"]
    assert list(dict.fromkeys(panel for panel, _ in shown))[1:7] == panels
    output = succeeds("serve", "--help")
    assert output.index("--page") < output.index("--help") < output.index("--rule-from")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rule = 'agn'\nlearning_rate = 1", "'learning_rate'.*'learning-rate'.*lease"),
        ("speed = 1", "unknown key 'speed'; known keys are .*, weight-decay"),
        ("quorum = 1.5", "quorum in .* must be of type int, got 1.5"),
        ("nesterov = 1", "nesterov in .* must be of type bool, got 1"),
        ("momentum = true", "momentum in .* must be of type float, got True"),
        ("rule = [", "cannot read .*center.toml"),
        ("rule = " + 3000 * "[", "cannot read .*center.toml"),
    ],
)
def test_bad_files_are_rejected(tmp_path, text, message):
    path = tmp_path / "center.toml"
    path.write_text(text)
    with pytest.raises(errors.InvalidArgumentError, match=message):
        _options.read_file(path, RuleOptions, CenterOptions)


def test_missing_file_is_rejected(tmp_path):
    output = fails("serve", "--config", tmp_path / "none.toml", code=2)
    assert "cannot read" in output
    assert "Traceback" not in output


def test_command_line_overrides_the_file(tmp_path):
    path = tmp_path / "center.toml"
    path.write_text("rule = 'agn'\nlearning-rate = 1\ngrace = 2\ntls-key = 'a.pem'\n")
    values = _options.read_file(path, RuleOptions, CenterOptions)
    rule = _options.with_defaults(RuleOptions(learning_rate=0.5), values)
    assert _options.given(rule) == {"rule": "agn", "learning_rate": 0.5}
    center = _options.with_defaults(CenterOptions(), values)
    assert isinstance(center.grace, float)
    assert center.tls_key.name == "a.pem"


def test_nonfinite_numbers_are_null_in_json(capsys):
    _options.print_json({"a": [float("nan"), 1.5], "b": {"c": float("inf")}})
    assert capsys.readouterr().out == '{"a": [null, 1.5], "b": {"c": null}}\n'
