"""The process of a center: its core, as a server uses it, in turns instead of threads.

What a servicer does with a worker's stream is here `Server._join` and `_exchange`.
"""

import functools
import random

import numpy as np
from faults.events import Blocked, Condition, Deferred, KilledError
from helpers import tuning

from agn_optax import errors
from agn_optax.center import Journal, Limits, Thresholds
from agn_optax.center._core import Core
from agn_optax.center._runtime import Runtime
from agn_optax.center._settings import CenterSettings

LEASE = 4.0  # s
HEARTBEAT_TIMEOUT = 4.0  # s
_ANSWER_INTERVAL = 2.0  # s, as that of a server
_OFF = Thresholds(
    **dict.fromkeys(
        ("lost_messages", "missed_periods", "still_center", "other_norm", "apart")
    ),
    one_by_one=None,
)


class Task:
    """A call of a thread of the server, repeated after it was blocked.

    Attributes:
      waits: whether it is blocked.
      turns: number of turns so far.
    """

    def __init__(self, process, call, link=None):
        self.process, self.call, self.link = process, call, link
        self.waits, self.turns = False, 0


class Server:
    """A center that is started again whenever its process has ended.

    Args:
      run: the run of the scenario.
      folder: directory of the journal.

    Attributes:
      core: the core; None while there is no process.
      process: number of processes so far.
    """

    def __init__(self, run, folder):
        self.core = None
        self.folder = folder
        self.process = 0
        scenario = self._scenario = run.scenario
        self._run, self._loop, self._disk = run, run.loop, run.disk
        self._settings = CenterSettings(
            scenario.rule,
            np.zeros(run.ledger.size, np.float32),
            mode=scenario.mode,
            barrier=scenario.barrier,
            durability=Journal(folder, size=scenario.journal_size, keep=scenario.keep)
            if scenario.journal
            else None,
            limits=Limits(lease=LEASE),
            thresholds=_OFF,
        )
        self._dice = random.Random(f"{scenario.seed} center")  # noqa: S311
        self._origin = 0.0  # of the clock of the process, s
        self._paused_until = 0.0
        self._links = []
        self._woken = []
        self._saving = self._flush_planned = False
        self._savers = 0  # calls in progress that save a snapshot
        self._replies = 0  # packets to workers and observers

    # The process.

    def start(self):
        """Start a process, which continues with what is on disk."""
        self.process += 1
        self._origin = self._dice.uniform(0, 1e5) - self._loop.now
        self._links, self._woken = [], []
        self._flush_planned = self._saving = False
        self._disk.dead = False
        self._act(self._make_core)

    def _make_core(self):
        runtime = Runtime(
            clock=lambda: self._loop.now + self._origin,
            condition=lambda _: Condition(self._let_writer, self._woken.extend),
            in_background=Deferred,
            keep_running=self._keep_running,
        )
        self._save = None
        try:
            core = Core(self._settings, flatten=True, runtime=runtime)
        except errors.DurabilityError as error:
            if "No space left" not in str(error):
                raise
            self.end(power=False)
            return
        self.core = core
        self._run.ledger.start(core)

    def _keep_running(self, loop, name):
        self._save = loop
        return Deferred(loop)

    def end(self, *, power):
        """End the process at once; with it the power may fail."""
        self.core = None
        self._disk.end_process()
        if power:
            share = self._dice.choice((0.0, 0.3, 0.7, 1.0))
            self._disk.cut_power(lambda: self._dice.random() < share)
        links, self._links = self._links, []
        for link in links:
            link.end()
        self._loop.at(self._dice.choice((0.1, 0.3, 2.5)), self.start)

    def pause(self, seconds):
        """Stop the process for some seconds."""
        self._paused_until = max(self._paused_until, self._loop.now + seconds)

    def close(self):
        """End the process as a server ends that is told to; False if it was killed."""
        return self._act(self.core.close)

    # Turns of its threads.

    def _act(self, call):
        """Call a function in the process; return whether the process is still alive."""
        self._disk.running = True
        try:
            call()
            return True
        except KilledError:
            self.end(power=self._scenario.power and self._dice.random() < 0.7)
            return False
        finally:
            self._disk.running = False

    def _run_task(self, task):
        if task.process != self.process or self.core is None:
            return
        if self._loop.now < self._paused_until:
            self._loop.at(self._paused_until - self._loop.now, self._run_task, task)
            return
        if not self._act(functools.partial(self._turn, task)):
            return
        if self.core.failure:  # as a server ends then
            self.end(power=False)
            return
        while self._woken:
            woken, self._woken[:] = list(self._woken), []
            for each in woken:
                if each.waits and not self._act(functools.partial(self._turn, each)):
                    return
        if not (self._flush_planned or tuning.is_journal_idle(self.core)):
            self._flush_planned = True
            self._later(self._dice.choice((0.0, 0.001, 0.02, 0.5)), self._write)
        elif tuning.is_snapshot_due(self.core) and not self._saving:
            self._saving = True
            self._later(self._dice.choice((0.0, 0.01, 0.2)), self._save_snapshot)

    def _turn(self, task):
        task.waits = False
        task.turns += 1
        try:
            task.call()
        except Blocked as blocked:
            task.waits = True
            blocked.condition.waiting[task] = None
            if blocked.timeout is not None:
                # At least a microsecond, or the clock might not move.
                delay = max(blocked.timeout, 1e-6)
                self._loop.at(delay, self._wake, task, task.turns)
        except errors.CenterClosedError:
            task.link.end()
        except errors.AgnOptaxError as error:
            task.link.fail(error)

    def _wake(self, task, turns):
        if task.waits and task.turns == turns:  # else it has had another turn
            self._run_task(task)

    def _later(self, delay, call, link=None):
        self._loop.at(delay, self._run_task, Task(self.process, call, link))

    def _write(self):
        self._flush_planned = False
        if not tuning.is_journal_idle(self.core):
            tuning.write_journal(self.core)

    def _save_snapshot(self):
        self._savers += 1
        try:
            self._save()
        except (Blocked, OSError):  # it is called again for another snapshot
            pass
        finally:
            self._savers -= 1
            self._saving = False

    def _let_writer(self):
        # A thread that saves a snapshot waits in the middle of it.
        if self._savers and not tuning.is_journal_idle(self.core):
            tuning.write_journal(self.core)
            return True
        return False

    # Calls of workers.

    def receive(self, link, packet):
        """Take a packet of a worker: a name, and its arguments."""
        if self.core is None or (link.process not in (None, self.process)):
            link.end()
            return
        if link.process is None:
            link.process = self.process
            self._links.append(link)
        if not link.is_ended:
            name, *args = packet
            call = functools.partial(getattr(self, f"_{name}"), link, *args)
            self._run_task(Task(self.process, call, link))

    def _join(self, link, worker, session_id, center_id, witnesses):
        core = self.core
        if center_id not in ("", core.center_id):
            raise errors.WorkerStateError("this center is another one")
        link.session = core.join(
            worker,
            session_id,
            resume=bool(center_id),
            witnesses=witnesses,
            heartbeat_timeout=HEARTBEAT_TIMEOUT,
            close_connection=link.end,
        )
        link.on_end = lambda: self._later(0.0, link.session.disconnect, link)
        self._then(link, self._wait_for_barrier)

    def _wait_for_barrier(self, link):
        if not self.core.wait_for_barrier(_ANSWER_INTERVAL):
            self._then(link, self._wait_for_barrier)
        else:
            self._reply(link, "joined", self.core.center_id)

    def _exchange(self, link, submission):
        if link.session is None:
            return  # the packet has overtaken the one that joins, which was lost
        link.session.submit(submission)
        self._then(link, self._wait_for_answer, submission.sequence)

    def _wait_for_answer(self, link, sequence):
        kept = link.session.answer(sequence, _ANSWER_INTERVAL)
        if kept is None:
            self._then(link, self._wait_for_answer, sequence)
        else:
            with self.core.reading(kept.version) as version:
                params = np.array(self.core.store.unplace(version.params))
            self._then(link, self._send_answer, kept, params)

    def _send_answer(self, link, kept, params):
        link.session.wait_until_kept(kept)
        answer = kept.answer._replace(params=params, witness=self.core.witness)
        self._reply(link, "answer", answer)

    def _reply(self, link, *packet):
        link.reply(*packet)
        self._replies += 1
        if self._replies in self._scenario.replies:
            self._disk.kill()

    def _then(self, link, call, *args):
        """Go on with another step of a thread, which may be blocked by itself."""
        if not link.is_ended:
            self._woken.append(task := Task(self.process, None, link))
            task.call, task.waits = functools.partial(call, link, *args), True

    def _acknowledge(self, link, sequence):
        if link.session is not None:
            link.session.acknowledge(sequence)

    def _pull(self, link):
        with self.core.reading(kept=True) as version:
            params = np.array(self.core.store.unplace(version.params))
            self._reply(link, "pulled", version.number, params)

    def _alive(self, link, worker, session_id):
        self.core.heartbeat([(worker, session_id)])

    def _leave(self, link, worker, session_id):
        self.core.leave(worker, session_id)
