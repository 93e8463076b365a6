"""Tokens of the command line: generated, stored for this user, and never logged."""

import json
import os
import stat
import subprocess
import urllib.request

import jax.numpy as jnp
import pytest
from helpers.commands import PATIENCE, ROOT, command, fails, python, serve, succeeds

from agn_optax import errors, rules, service

RULE = rules.downpour()
READS, DRAINS = "observer-0123456789", "operator-0123456789"


@pytest.fixture
def runtime(tmp_path, monkeypatch):
    """The folder in which a center stores its token for this user's programs."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    return tmp_path / "run" / "agn-optax"


@pytest.fixture
def address(unix_address):
    return unix_address


@pytest.fixture
def tokens(tmp_path):
    path = tmp_path / "tokens"
    path.write_text(f"observer * {READS}\noperator * {DRAINS}\nchief a {'c' * 20}\n")
    return path


def token_file(folder, token):
    path = folder / "token"
    path.write_text(token)
    return f"--token-file={path}"


def test_generated_token_is_stored_for_this_user(runtime, address, monkeypatch):
    seen = {}

    def look(center):
        (left,) = runtime.iterdir()
        seen["token"] = left.read_text()
        modes = [stat.S_IMODE(path.stat().st_mode) for path in (left, runtime)]
        assert modes == [0o600, 0o700]
        center.initialize(jnp.zeros(3), worker="anna")
        center.join("anna").leave()
        for name in ("status", "doctor"):
            succeeds(name, address)
        succeeds("watch", address, "--count=1")
        with monkeypatch.context() as elsewhere:
            elsewhere.setenv("XDG_RUNTIME_DIR", str(runtime / "elsewhere"))
            assert "requires a token" in fails("status", address, code=1)
            with pytest.raises(errors.NotAllowedError):
                service.connect(address, RULE)
            service.connect(address, RULE, token=seen["token"]).close()

    result = serve(address, RULE, "--rule=downpour", then=look)
    assert result.stdout == f"serving downpour at {address}\ntoken {seen['token']}\n"
    assert seen["token"] not in result.stderr
    # A center restarted at this address accepts the tokens of its workers.
    (left,) = runtime.iterdir()
    assert left.read_text() == seen["token"]
    again = serve(address, RULE, "--rule=downpour").stdout
    assert again == f"serving downpour at {address}\ntoken {seen['token']}\n"
    assert stat.S_IMODE(left.stat().st_mode) == 0o600


def test_token_of_the_page_is_for_observers_only(runtime, address, monkeypatch):
    made = [digit * 64 for digit in "ab"]
    monkeypatch.setattr(service.tokens, "generate", iter(made).__next__)
    seen = {}

    def look(center):
        seen["page"] = center.status()["page_address"]
        with service.Observer(address, token=made[1]) as observer:
            assert observer.status()["rule"] == "downpour"
            with pytest.raises(errors.NotAllowedError, match="operator"):
                observer.drain()
        request = urllib.request.Request(seen["page"] + "metrics")  # noqa: S310 ours
        request.add_header("Authorization", f"Bearer {made[1]}")
        with urllib.request.urlopen(request) as answer:  # noqa: S310
            assert b"agn_optax_uptime_seconds" in answer.read()

    result = serve(address, RULE, "--rule=downpour", "--page", then=look)
    assert seen["page"].startswith("http://127.0.0.1:")
    assert result.stdout == (
        f"serving downpour at {address}\ntoken {made[0]}\n"
        f"page at {seen['page']}\ntoken of the page {made[1]}\n"
    )


def test_page_address_follows_from_the_options(monkeypatch):
    found = []

    def serve_nothing(rule, *, page, **settings):
        found.append(page)
        raise errors.CenterError("this is only a test")

    monkeypatch.setattr(service, "serve", serve_nothing)
    for options, page in [
        ([], None),
        (["--page"], "127.0.0.1:0"),
        (["--page-address=127.0.0.1:80"], "127.0.0.1:80"),
        (["--page", "--page-address=127.0.0.1:80"], "127.0.0.1:80"),
        (["--no-page"], None),
    ]:
        fails("serve", "--rule=downpour", "--open", *options, code=1)
        assert found.pop() == page
    output = fails(
        "serve", "--rule=downpour", "--no-page", "--page-address=a:1", code=2
    )
    assert "--no-page exclude" in output
    assert not found


def test_token_of_a_random_port_is_removed_with_its_center(runtime):
    made = service.tokens.for_address("127.0.0.1:0")
    with service.tokens.token_file("127.0.0.1:5000", made):
        assert len(list(runtime.iterdir())) == 1
    assert not list(runtime.iterdir())


def test_json_output_of_serve_has_the_token(runtime, address):
    output = serve(address, RULE, "--rule=downpour", "--json").stdout
    assert len(json.loads(output)["token"]) == 64


def _token_for(address):
    """Return the token a client would present at an address if given none."""
    return service.tokens.source(None, lambda: address)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_token_of_a_center_on_all_interfaces_is_found_locally(runtime, host):
    with service.tokens.token_file("0.0.0.0:5000", "everywhere"):
        assert _token_for(f"{host}:5000")() == "everywhere"
        with service.tokens.token_file("127.0.0.1:5000", "here"):
            assert _token_for(f"{host}:5000")() == "here"
        assert _token_for(f"{host}:5001")() is None
        assert _token_for("192.0.2.1:5000")() is None


def test_ended_center_keeps_the_token_of_its_successor(runtime):
    with service.tokens.token_file("127.0.0.1:1", "second"):
        with service.tokens.token_file("127.0.0.1:1", "first"):
            (path,) = runtime.iterdir()
            path.write_text("second")
        assert _token_for("127.0.0.1:1")() == "second"


def test_observer_token_from_a_file_cannot_drain(runtime, address, tokens, tmp_path):
    def look(center):
        assert not runtime.exists()
        for name in ("status", "doctor"):
            succeeds(name, address, token_file(tmp_path, READS))
        output = fails("drain", address, token_file(tmp_path, READS), code=1)
        assert "Drain needs the role operator" in output
        assert READS not in output

    result = serve(
        address, RULE, "--rule=downpour", f"--tokens={tokens}", then=look, token=READS
    )
    assert result.stdout == f"serving downpour at {address}\n"


def test_open_center_needs_no_token(runtime, address):
    def look(center):
        assert not runtime.exists()
        center.initialize(jnp.zeros(3), worker="anna")

    serve(address, RULE, "--rule=downpour", "--open", then=look)


def test_open_center_on_all_interfaces_is_rejected():
    output = fails("serve", "--rule=downpour", "--open", "--address=0.0.0.0:0", code=2)
    assert "insecure=True" in output


def test_operator_can_drain_a_center(runtime, tokens, tmp_path):
    arguments, environment = python(
        *(
            "-m",
            "agn_optax.ops.cli",
            "serve",
            "--rule=downpour",
            "--address=127.0.0.1:0",
        ),
        *("--json", f"--tokens={tokens}"),
    )
    with subprocess.Popen(  # noqa: S603 our own program
        arguments,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            address = json.loads(process.stdout.readline())["address"]
            succeeds("drain", address, token_file(tmp_path, DRAINS))
            assert process.wait(PATIENCE) == 0
            output = process.stderr.read()
            assert output.count("draining") == 1
            assert "as requested by" in output
            assert DRAINS not in output
        finally:
            process.kill()


WORKER = """
import os, pathlib, sys, jax.numpy as jnp
from agn_optax import errors, rules, service

me = service.environment()
lines = [p.read_bytes() for p in pathlib.Path("/proc").glob("[0-9]*/cmdline")]
if os.path.exists("/proc"):
    assert any(b"agn_optax.ops.cli" in line for line in lines)
assert not any(os.environ["AGN_OPTAX_TOKEN"].encode() in line for line in lines)
with service.connect(me.address, rules.downpour()) as center:
    if me.rank == 0:
        center.initialize({"w": jnp.ones(3)}, worker=me.worker)
    center.join(me.worker).leave()
    for rejected in (
        lambda: center.join("worker-7"),
        lambda: me.rank and center.initialize({"w": jnp.ones(3)}, worker=me.worker),
    ):
        try:
            print("let in" if rejected() else "")
        except errors.NotAllowedError as error:
            print("rejected:", error)
here = {k: v for k, v in os.environ.items() if not k.startswith("AGN_OPTAX_T")}
os.environ.clear()
os.environ.update(here)
with service.Observer(me.address) as observer:  # as any program of this user
    print("watched", observer.status()["rule"])
pathlib.Path(f"{me.worker}.token").write_text(str(os.getpid()))
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Use a temporary current directory whose programs import this checkout."""
    monkeypatch.chdir(tmp_path)
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    return tmp_path


@pytest.mark.slow
def test_each_launched_worker_has_its_own_token(runtime, here):
    (here / "train.py").write_text(WORKER)
    result = command("launch", "--workers=2", "--rule=downpour", "train.py")
    assert result.exit_code == 0, result.output
    text = result.output
    for rank in range(2):
        rejected = f"worker-{rank} | rejected: only worker 'worker-7' itself may"
        assert rejected in text
        assert f"worker-{rank} | watched downpour" in text
    assert "worker-1 | rejected: Initialize needs the role chief" in text
    assert "worker-0 | rejected: Initialize" not in text
    assert "let in" not in text
    center = [line for line in text.splitlines() if line.startswith("center")]
    assert "serving at" in center[0]
    assert not any("token" in line for line in center)
    assert not list(runtime.iterdir())


@pytest.mark.slow
def test_launched_center_can_be_open(runtime, here):
    (here / "train.py").write_text(
        "import os\nprint([name for name in os.environ if 'OPTAX_TOKEN' in name])"
    )
    result = command("launch", "--workers=1", "--rule=downpour", "--open", "train.py")
    assert "worker-0 | []" in result.output
