"""Programs run side by side: their output, restarts and exit codes; all of them end."""

import collections
import contextlib
import os
import pathlib
import select
import signal
import socket
import subprocess
import sys
import threading

import pytest

from agn_optax import errors
from agn_optax.ops.launch import Program, run

PATIENCE = 30.0  # s, generous: no wait should come near it, even on a busy machine
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class LivenessServer:
    """Knows which processes live: each holds a connection that closes at its end."""

    def __init__(self):
        self.server = socket.create_server(("127.0.0.1", 0))
        self.server.settimeout(PATIENCE)
        self.alive = collections.defaultdict(list)

    def meet(self, who):
        """Wait until a process with this name lives."""
        while not self.alive[who]:
            connection, _ = self.server.accept()
            connection.settimeout(PATIENCE)
            with connection.makefile("rb", buffering=0) as file:  # reads no further
                name = file.readline().decode().strip()
            self.alive[name].append(connection)

    def release(self, who):
        """Let a process with this name continue that waits in ``s.recv(1)``."""
        self.meet(who)
        self.alive[who][0].sendall(b"!")

    def accept_all(self):
        """Accept all pending connections, without waiting."""
        while select.select([self.server], [], [], 0)[0]:
            connection, _ = self.server.accept()
            connection.settimeout(PATIENCE)
            self.alive["stranger"].append(connection)

    def see_the_end(self, who):
        """Wait until all processes with this name have ended."""
        for connection in self.alive.pop(who):
            with connection, contextlib.suppress(ConnectionResetError):
                while connection.recv(100):
                    pass

    def close(self):
        self.accept_all()
        for who in list(self.alive):
            self.see_the_end(who)
        self.server.close()


@pytest.fixture
def witness():
    witness = LivenessServer()
    yield witness
    witness.close()  # times out while a process is alive


@pytest.fixture(autouse=True)
def nothing_is_left():
    def state():
        handlers = tuple(signal.getsignal(signum) for signum in FORWARDED)
        return set(threading.enumerate()), open_files(), handlers, children()

    threads, files, handlers, processes = state()
    yield
    new_threads, new_files, new_handlers, new_processes = state()
    assert new_threads <= threads
    assert new_files <= files
    assert new_handlers == handlers
    assert new_processes <= processes


def open_files():
    # The folder itself is open while it is listed.
    return {fd for fd in map(int, os.listdir("/dev/fd")) if is_open(fd)}  # noqa: PTH208


def is_open(fd):
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def children():
    """Return the children of this process, zombies included (empty except on Linux)."""
    tasks = pathlib.Path("/proc/self/task").glob("*/children")
    return {pid for task in tasks for pid in task.read_text().split()}


def python(name, program, *arguments, **settings):
    command = [sys.executable, "-S", "-c", program, *map(str, arguments)]
    return Program(name, command, **settings)


def living(witness, name, then="signal.pause()", **settings):
    """Return a program that connects to the witness before it does the rest."""
    return python(name, connecting(witness, name, then), **settings)


def connecting(witness, who, then="signal.pause()"):
    return (
        "import os, signal, socket, subprocess, sys\n"
        f"s = socket.create_connection({witness.server.getsockname()})\n"
        f"s.sendall(b'{who}\\n')\n" + then
    )


class Lines(list):
    """An output callback that collects lines; ``on`` maps some of them to actions."""

    def __init__(self, on):
        self.on = on

    def __call__(self, name, line):
        self.append((name, line))
        if line in self.on:
            self.on[line]()

    def of(self, name):
        return [line for who, line in self if who == name]


def launch(*programs, on=None, **settings):
    lines = Lines(on or {})
    ended = run(programs, output=lines, **{"restart_delay": 0.01, **settings})
    assert [e.name for e in ended] == [program.name for program in programs]
    return lines, ended


def test_lines_carry_the_name_of_their_program():
    program = "import sys; print('out', sys.argv[1]); print('err', file=sys.stderr)"
    lines, ended = launch(python("a", program, 1), python("b", program, 2))
    assert sorted(lines.of("a")) == ["err", "out 1"]
    assert sorted(lines.of("b")) == ["err", "out 2"]
    for e in ended:
        assert (e.returncode, e.restarts, e.stopped) == (0, 0, False)
        assert 0 < e.seconds < PATIENCE


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (b"", []),
        (b"\n\na\n", ["", "", "a"]),
        (b"no end", ["no end"]),
        (b"1%\r2%\r3%\r\ndone\n", ["1%", "2%", "3%", "done"]),
        (b"left\r", ["left"]),
        (b"\xff\xc3\xa9\n\xc3", ["\ufffd\u00e9", "\ufffd"]),
        ("a\u2028b\x0bc\x0c\n".encode(), ["a\u2028b\x0bc\x0c"]),  # all one line
    ],
)
def test_output_is_split_into_lines(written, expected):
    lines, _ = launch(python("a", f"import os; os.write(1, {written!r})"))
    assert lines.of("a") == expected


def test_line_longer_than_the_limit_is_split():
    longest = 1 << 16  # characters
    program = f"import os, sys; sys.stdout.write('x' * {3 * longest + 7})"
    lines, _ = launch(python("a", program))
    assert [len(line) for line in lines.of("a")] == [longest] * 3 + [7]


def test_characters_and_line_ends_are_reassembled():
    """Each byte is written after the one before has been read from the pipe."""
    data = "é\r\nü\rx".encode()
    program = (
        "import fcntl, os, termios, time\n"
        f"for byte in {data!r}:\n"
        "    os.write(1, bytes([byte]))\n"
        "    while fcntl.ioctl(1, termios.FIONREAD, bytes(4)) != bytes(4):\n"
        "        time.sleep(0.001)\n"
    )
    lines, _ = launch(python("a", program))
    assert lines.of("a") == ["é", "ü", "x"]


def test_much_output_of_several_programs_is_complete():
    program = "import sys\nfor i in range(20000): print(i, '-' * 50)"
    lines, _ = launch(*(python(name, program) for name in "abc"))
    expected = [f"{i} {'-' * 50}" for i in range(20000)]
    for name in "abc":
        assert lines.of(name) == expected


def test_lines_arrive_as_soon_as_they_are_written(witness):
    then = "print('hello'); s.recv(1); print('goodbye')"
    lines, _ = launch(
        living(witness, "a", then), on={"hello": lambda: witness.release("a")}
    )
    assert lines.of("a") == ["hello", "goodbye"]


def test_program_gets_its_environment_and_an_empty_stdin(monkeypatch):
    monkeypatch.setenv("INHERITED", "1")
    monkeypatch.setenv("REPLACED", "1")
    program = (
        "import os, sys\n"
        "for name in ['INHERITED', 'REPLACED', 'ADDED', 'PYTHONUNBUFFERED',"
        " 'AGN_OPTAX_RESTARTS']: print(os.environ[name])\n"
        "print(repr(sys.stdin.read()))"
    )
    environment = {"REPLACED": "2", "ADDED": "3"}
    lines, _ = launch(python("a", program, environment=environment))
    assert lines.of("a") == ["1", "2", "3", "1", "0", "''"]
    before = {"REPLACED": "", "ADDED": "", "AGN_OPTAX_RESTARTS": "7"}  # elsewhere
    lines, _ = launch(python("a", program, environment=before))
    assert lines.of("a")[-2] == "7"


def test_failed_program_is_restarted():
    program = (
        "import os, sys; n = int(os.environ['AGN_OPTAX_RESTARTS']); print('start', n)\n"
        "sys.exit(4 if n < 2 else 0)"
    )
    lines, (ended,) = launch(python("a", program, restarts=3))
    assert lines.of("a") == [
        "start 0",
        "agn-optax: exit status 4",
        "agn-optax: restarted (1 of 3) after exit status 4",
        "start 1",
        "agn-optax: exit status 4",
        "agn-optax: restarted (2 of 3) after exit status 4",
        "start 2",
    ]
    assert (ended.returncode, ended.restarts, ended.stopped) == (0, 2, False)


def test_restart_waits_for_the_delay():
    aborts = python("a", "import os; os.abort()", restarts=2)
    _, (ended,) = launch(aborts, restart_delay=0.2)
    assert (ended.returncode, ended.restarts) == (-signal.SIGABRT, 2)
    assert ended.seconds > 0.4


def test_failure_after_the_last_restart_ends_all_programs(witness):
    broken = living(witness, "broken", "os.kill(os.getpid(), 9)", restarts=1)
    lines, ended = launch(
        living(witness, "a"),
        broken,
        living(witness, "b", restarts=9),  # none of them is used
    )
    assert lines.of("broken") == [
        "agn-optax: killed by SIGKILL",
        "agn-optax: restarted (1 of 1) after SIGKILL",
        "agn-optax: killed by SIGKILL",
    ]
    assert [e.returncode for e in ended] == [-signal.SIGTERM, -9, -signal.SIGTERM]
    assert [e.stopped for e in ended] == [True, False, True]
    assert [e.restarts for e in ended] == [0, 1, 0]


def test_pending_restart_is_cancelled_when_all_end(witness):
    _, ended = launch(
        python("first", "raise SystemExit(1)", restarts=1),
        living(witness, "second", "s.recv(1); sys.exit(2)"),
        on={"agn-optax: exit status 1": lambda: witness.release("second")},
        restart_delay=3600.0,
    )
    assert [(e.returncode, e.stopped) for e in ended] == [(1, True), (2, False)]
    assert ended[0].restarts == 0


def test_program_that_is_not_waited_for_is_ended_last(witness):
    bye = "signal.signal(15, lambda *_: (print('bye'), sys.exit()))\n"
    server = bye + "print('up'); signal.pause()"
    lines, ended = launch(
        living(witness, "server", server, waited_for=False),
        living(witness, "a", "s.recv(1); print('done')"),
        living(witness, "b", "s.recv(1); print('done')"),
        on={"up": lambda: witness.release("a"), "done": lambda: witness.release("b")},
    )
    assert lines == [("server", "up"), ("a", "done"), ("b", "done"), ("server", "bye")]
    assert [e.returncode for e in ended] == [0, 0, 0]
    assert [e.stopped for e in ended] == [True, False, False]


@pytest.mark.parametrize("how", ["failure", "signal"])
def test_server_is_ended_after_its_followers(how):
    """The client can send to its server until it has ended: here, through a pipe."""
    back, front = os.pipe()
    with os.fdopen(back), os.fdopen(front, "w"):
        path = f"/proc/{os.getpid()}/fd"
        server = (
            "import os, signal, sys\n"
            f"words = os.open('{path}/{back}', os.O_RDONLY | os.O_NONBLOCK)\n"
            "signal.signal(15, lambda *_: sys.exit(os.read(words, 99).decode()))\n"
            "print('up', flush=True)\nsignal.pause()"
        )
        client = (
            "import signal, sys, time\n"
            "def flush(*_):\n"
            "    time.sleep(0.3)\n"
            f"    open('{path}/{front}', 'w').write('last words')\n"
            "    sys.exit()\n"
            "signal.signal(15, flush)\nprint('ready', flush=True)\nsignal.pause()"
        )
        ends = {
            "failure": "input()",  # stdin is empty
            "signal": "import os, signal; os.kill(os.getppid(), 15); signal.pause()",
        }
        last = python("last", ends[how])
        worker = python("client", client, followers=lambda line: [last])
        programs = [
            python("server", server, waited_for=False, followers=lambda line: [worker])
        ]
        lines = Lines({})
        with contextlib.suppress(SystemExit):
            run(programs, output=lines, grace=PATIENCE)
        text = lines.of("server")
    assert text == ["up", "last words", "agn-optax: exit status 1"]


def test_failed_server_ends_all_programs(witness):
    _, ended = launch(
        python("server", "raise SystemExit(3)", waited_for=False),
        living(witness, "a"),
    )
    assert [e.returncode for e in ended] == [3, -signal.SIGTERM]


@pytest.mark.parametrize("restarts", [0, 3])
def test_server_that_exits_ends_all_programs(witness, restarts):
    lines, ended = launch(
        python("server", "print('enough')", waited_for=False, restarts=restarts),
        living(witness, "a"),
    )
    output = "agn-optax: has ended, so the other programs are ended"
    assert lines.of("server") == ["enough", output]
    assert [e.returncode for e in ended] == [0, -signal.SIGTERM]
    assert [e.stopped for e in ended] == [False, True]


def test_interrupt_prints_no_traceback(witness):
    commands = [connecting(witness, who, "print('up'); signal.pause()") for who in "ab"]
    with launcher(witness, *commands) as process:
        assert sorted(process.stdout.readline() for _ in range(2))
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=PATIENCE)
    *lines, _ = out.splitlines()
    assert sorted(lines) == [f"p{i} agn-optax: killed by SIGTERM" for i in range(2)]


def test_programs_of_an_ended_server_get_a_second_signal(witness):
    """The second signal comes before the grace is over, and nothing is killed."""
    program = (
        "received = []\nsignal.signal(15, lambda *_: received.append(1))\nprint('up')\n"
    )
    program += "while len(received) < 2: signal.pause()\nprint('leaves')"
    lines, ended = launch(
        living(witness, "server", "s.recv(1)", waited_for=False),
        living(witness, "a", program),
        on={"up": lambda: witness.release("server")},
        grace=6.0,  # the second signal comes after half of it
    )
    assert lines.of("a") == ["up", "leaves"]
    assert [(e.returncode, e.stopped) for e in ended] == [(0, False), (0, True)]


STUBBORN = "signal.signal(15, signal.SIG_IGN)\nwhile True: signal.pause()"


def test_program_that_ignores_sigterm_is_killed_after_the_grace(witness):
    stubborn = STUBBORN.replace("\n", "; print('up')\n")
    lines, ended = launch(
        living(witness, "stubborn", stubborn, waited_for=False),
        living(witness, "a", "s.recv(1)"),
        on={"up": lambda: witness.release("a")},
        grace=0.3,
    )
    assert lines.of("stubborn") == [
        "up",
        "agn-optax: killed processes that had not ended within 0.3 s",
        "agn-optax: killed by SIGKILL",
    ]
    assert ended[0].returncode == -signal.SIGKILL
    assert ended[0].seconds - ended[1].seconds > 0.25


def grandchild(witness, who, then, how=""):
    """Return code that starts a child process and waits until it is `READY`."""
    program = connecting(witness, who, then)
    return (
        "ready, done = os.pipe()\n"
        f"child = subprocess.Popen([sys.executable, '-S', '-c', {program!r},"
        f" str(done)], pass_fds=[done]{how})\n"
        "os.read(ready, 1)\n"
    )


READY = "os.write(int(sys.argv[1]), b'!')\n"


@pytest.mark.parametrize("how", ["", ", stdout=-3, stderr=-3"])  # -3: to /dev/null
@pytest.mark.parametrize("leader", ["signal.pause()", "sys.exit(0)", "sys.exit(1)"])
def test_grandchildren_end_with_their_program(witness, leader, how):
    then = grandchild(witness, "grandchild", READY + STUBBORN, how)
    launch(
        living(witness, "a", f"{then}print('go'); {leader}", waited_for=False),
        living(witness, "b", "s.recv(1)"),
        on={"go": lambda: witness.release("b")},
        grace=0.1,
    )
    witness.meet("grandchild")
    witness.see_the_end("grandchild")


def test_grandchildren_can_write_output_during_the_grace(witness):
    # For instance, a worker started by a shell that itself ends at once.
    last = "signal.signal(15, lambda *_: (print('last words'), sys.exit()))\n"
    then = grandchild(witness, "grandchild", last + READY + "signal.pause()")
    lines, _ = launch(living(witness, "a", then), grace=PATIENCE)
    assert lines.of("a") == ["last words"]


def test_grandchild_in_another_session_does_not_delay_the_end(witness):
    escaped = "os.write(1, b'part')\n" + READY + "s.recv(1)"
    then = grandchild(witness, "escaped", escaped, ", start_new_session=True")
    lines, (ended,) = launch(living(witness, "a", then), grace=0.1)
    assert (ended.returncode, ended.stopped) == (0, False)
    assert lines.of("a") == [
        "agn-optax: killed processes that had not ended within 0.1 s",
        "part",
    ]
    witness.release("escaped")


def test_exception_in_the_output_callback_ends_all(witness):
    def output(name, line):
        calls.append(line)
        witness.meet("b")
        raise ZeroDivisionError

    calls = []
    # The last output is longer than a pipe can hold.
    last = "signal.signal(15, lambda *_: (print('y' * 200000), s.sendall(b'done'),"
    last += " sys.exit()))\n"
    a = living(witness, "a", last + "print('up'); signal.pause()")
    with pytest.raises(ZeroDivisionError):
        run([a, living(witness, "b")], output=output)
    assert calls == ["up"]
    witness.meet("a")
    assert witness.alive["a"][0].recv(4) == b"done"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["/does/not/exist", "x"], "'broken' cannot be started.*No such file.*'x'"),
        ([os.devnull], "'broken' cannot be started.*Permission"),
        (["a\0b"], "'broken' cannot be started.*null byte"),
    ],
)
def test_command_that_cannot_be_started_is_rejected(witness, command, message):
    programs = [
        living(witness, "a"),
        Program("broken", command),
        python("never", "print('started')"),
    ]
    with pytest.raises(errors.InvalidArgumentError, match=message):
        run(programs, output=pytest.fail)


def test_command_that_cannot_be_restarted_ends_the_run(witness, tmp_path):
    script = tmp_path / "once"
    script.write_text(f"#!{sys.executable}\nimport os; os.remove(__file__); exit(1)\n")
    script.chmod(0o700)
    once = Program("once", [str(script)], restarts=1)
    with pytest.raises(errors.InvalidArgumentError, match="'once' cannot be started"):
        run([living(witness, "a"), once], output=print, restart_delay=0.0)


def test_run_works_in_another_thread(witness):
    result = []
    broken = python("broken", "raise SystemExit(3)")
    thread = threading.Thread(
        target=lambda: result.append(launch(living(witness, "a"), broken)[1])
    )
    thread.start()
    thread.join(PATIENCE)
    assert [e.returncode for e in result[0]] == [-signal.SIGTERM, 3]


# A separate launcher that prints the programs' lines and the exception of `run`.
# To start quickly it skips the __init__ of agn_optax, which would import JAX.
LAUNCHER = """
import signal, sys, types
sys.modules["agn_optax"] = types.ModuleType("agn_optax")
sys.modules["agn_optax"].__path__ = [PACKAGE]
from agn_optax.ops.launch import Program, run
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore it
if "nohup" in sys.argv:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
commands = sys.argv[2:4]
try:
    python = [sys.executable, "-S", "-c"]
    run(
        [Program(f"p{i}", [*python, code]) for i, code in enumerate(commands)],
        output=lambda name, line: print(name, line, flush=True),
        grace=float(sys.argv[1]),
    )
except BaseException as error:
    print(repr(error), signal.getsignal(2).__name__, flush=True)
    raise
""".replace("PACKAGE", repr(str(pathlib.Path(errors.__file__).parent)))


@contextlib.contextmanager
def launcher(witness, *commands, grace=PATIENCE, flag=""):
    process = subprocess.Popen(  # noqa: S603 our own program
        [sys.executable, "-S", "-c", LAUNCHER, str(grace), *commands, flag],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        try:
            witness.meet("a")
            witness.meet("b")
            yield process
        finally:
            process.kill()


REPORT = """
def report(signum, frame):
    print("got", signal.Signals(signum).name)
    sys.exit(0)
for signum in (1, 2, 3, 15): signal.signal(signum, report)
print("up")
signal.pause()
"""


@pytest.mark.parametrize(
    ("signum", "status", "raised"),
    [
        (signal.SIGINT, -signal.SIGINT, "KeyboardInterrupt()"),
        (signal.SIGTERM, 143, "SystemExit(143)"),
    ],
)
def test_signals_are_forwarded_and_reported(witness, signum, status, raised):
    """An interrupt is forwarded as SIGTERM: Python prints no traceback for that."""
    commands = [connecting(witness, who, REPORT) for who in "ab"]
    with launcher(witness, *commands) as process:
        output = sorted(process.stdout.readline() for _ in range(2))
        assert output == ["p0 up\n", "p1 up\n"]
        process.send_signal(signum)
        out, _ = process.communicate(timeout=PATIENCE)
        *lines, last = out.splitlines()
        assert sorted(lines) == [f"p{i} got SIGTERM" for i in range(2)]
        assert last == f"{raised} default_int_handler"
        assert process.returncode == status


def test_signal_to_another_thread_is_handled(witness):
    """The system may choose any thread; the main thread waits for the programs."""

    def kill():
        witness.meet("a")
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

    killer = threading.Thread(target=kill)
    program = living(witness, "a", f"signal.alarm({PATIENCE:.0f}); signal.pause()")
    killer.start()
    lines = Lines({})
    with pytest.raises(SystemExit) as raised:
        run([program], output=lines)
    killer.join()
    assert raised.value.code == 128 + signal.SIGTERM
    assert lines.of("a") == ["agn-optax: killed by SIGTERM"]  # and not by its alarm


def test_second_interrupt_kills_and_ignored_sighup_is_not_sent(witness):
    stubborn = "for n in (2, 15): signal.signal(n, signal.SIG_IGN)\nprint('up')\n"
    pause = "signal.signal(1, lambda *_: print('hung up'))\nwhile 1: signal.pause()"
    commands = [connecting(witness, who, stubborn + pause) for who in "ab"]
    with launcher(witness, *commands, grace=0.2, flag="nohup") as process:
        for _ in range(2):
            assert process.stdout.readline().endswith("up\n")
        process.send_signal(signal.SIGHUP)  # ignored under nohup
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)  # the second one shortens the wait
        out, _ = process.communicate(timeout=PATIENCE)
        assert "hung up" not in out
        assert out.count("killed by SIGKILL") == 2
        assert process.returncode == -signal.SIGINT


def test_programs_are_killed_with_their_launcher(witness):
    a = connecting(witness, "a", grandchild(witness, "c", READY + STUBBORN) + STUBBORN)
    with launcher(witness, a, connecting(witness, "b", STUBBORN)) as process:
        witness.meet("c")
        os.killpg(process.pid, signal.SIGKILL)  # so no process of its group can help
        for who in "abc":
            witness.see_the_end(who)


@pytest.mark.parametrize(
    ("programs", "message"),
    [
        ([], "at least one program must be waited for"),
        (
            [python("a", "", waited_for=False)],
            "at least one program must be waited for",
        ),
        ([python("a", ""), python("b", ""), python("a", "")], "must differ.*'b'"),
    ],
)
def test_impossible_programs_are_rejected(programs, message):
    with pytest.raises(errors.InvalidArgumentError, match=message):
        run(programs, output=print)


def test_followers_start_when_a_line_gives_what_they_need(witness):
    def followers(line):
        asked.append(line)
        needed = line.removeprefix("serving at ")
        return [] if needed == line else [follower(name, needed) for name in "ab"]

    def follower(name, needed):
        return python(name, "import sys; print(sys.argv[1])", needed)

    asked = []
    code = "print('hello'); print('serving at x'); print('more'); signal.pause()"
    server = living(witness, "s", code, waited_for=False, followers=followers)
    lines = Lines({})
    ended = run([server], output=lines)
    assert asked == ["hello", "serving at x"]
    assert lines.of("a") == lines.of("b") == ["x"]
    assert [e.name for e in ended] == ["s", "a", "b"]
    assert [e.stopped for e in ended] == [True, False, False]


@pytest.mark.parametrize("status", [0, 3])
def test_program_that_ends_early_gets_no_followers(status):
    server = python(
        "s",
        f"print('hello'); raise SystemExit({status})",
        waited_for=False,
        followers=lambda line: [],
    )
    _, (ended,) = launch(server)
    assert (ended.returncode, ended.stopped) == (status, False)


def test_followers_that_cannot_be_started_end_all(witness):
    broken = Program("broken", ["/does/not/exist"])
    server = living(
        witness, "s", "print('up')\n" + STUBBORN, followers=lambda _: [broken]
    )
    with pytest.raises(errors.InvalidArgumentError, match="'broken' cannot be started"):
        run([server], output=lambda name, line: None, grace=0.1)


@pytest.mark.parametrize("setting", ["grace", "restart_delay"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_impossible_times_are_rejected(setting, value):
    with pytest.raises(errors.InvalidArgumentError, match=f"{setting} must be"):
        run([python("a", "")], output=print, **{setting: value})


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("", ["true"]), errors.InvalidArgumentError, "name"),
        (("a", []), errors.InvalidArgumentError, "'a' has an empty command"),
        (("a", "python x.py"), errors.InvalidTypeError, "'a' must be a list"),
        (("a", ["true"], {}, -1), errors.InvalidArgumentError, "'a'.*-1"),
    ],
)
def test_impossible_program_is_rejected(arguments, error, message):
    with pytest.raises(error, match=message):
        Program(*arguments)
