"""Workers: the exchange machine, driven as `Worker` and a remote session drive it."""

import random

import numpy as np
from faults.center import HEARTBEAT_TIMEOUT
from faults.ledger import BrokenError

from agn_optax import errors
from agn_optax.center import Submission
from agn_optax.worker._machine import Counts, ExchangeMachine, State

_TIMEOUT = 3.0  # s after which a silent center is called over another link
_ROUND = 2  # local steps


class KilledError(Exception):
    """The process of the worker has been killed."""


class Link:
    """A connection: packets to the center, and replies; each may be lost or late."""

    def __init__(self, run, life):
        self.process = None  # of the center
        self.session = None
        self.is_ended = False
        self.has_joined = False  # as its worker was told
        self.on_end = lambda: None
        self._run, self._life = run, life
        self._name = life.name

    def send(self, *packet):
        """Send a packet to the center."""
        for delay in self._run.delays(self._name):
            self._run.loop.at(delay, self._run.server.receive, self, packet)

    def reply(self, *packet):
        """Send a packet to the worker."""
        for delay in self._run.delays(self._name):
            self._run.loop.at(delay, self._life.receive, self, packet)

    def fail(self, error):
        """End the link with an error, which the worker gets."""
        self.reply("error", error)
        self.end()

    def end(self):
        """End the link; the worker notices it later, or never."""
        if not self.is_ended:
            self.is_ended = True
            self.on_end()
            self.reply("ended")


class Life:
    """One process of a worker."""

    def __init__(self, worker, checkpoint=None):
        self.worker, self.name, self._run = worker, worker.name, worker.run
        self._loop = self._run.loop
        scenario = self._run.scenario
        self.machine = ExchangeMachine(overlap=scenario.overlap)
        self.is_alive = True
        self.link = None
        self._answer = None  # to the message in flight, or that is waited for
        self._message = None
        self._calls = False  # whether a call of the training loop is in progress
        self._checkpoint = checkpoint
        self._one_call = ()  # a call without a session: the request, until its reply
        self._attempt = 0
        self._pause = 0.05  # s before the center is called again
        self.version = 0
        self.witnesses = ()  # that of the last answer
        self.seen = 0  # version adopted last
        if checkpoint is None:
            self._new_session()
        else:
            self.center_id, self.session_id = checkpoint["token"]
            self.x = checkpoint["x"]
            self.version = checkpoint["version"]
            self.witnesses = checkpoint["witnesses"]
            worker.samples = self._first = checkpoint["samples"]
            self._sent_from = checkpoint["first"]
            self.machine.start(
                completed=checkpoint["completed"],
                exchanges=checkpoint["exchanges"],
                counts=Counts(_ROUND),
            )
        self._connect()
        self._beat()

    def _new_session(self):
        self.center_id = ""
        self.session_id = self._run.ledger.new_session(self.worker.name)
        self.seen = 0
        self._first = self.worker.samples  # first sample of this round

    def kill(self):
        """End the process at once."""
        self.is_alive = False
        if self.link is not None:
            self.link.end()

    def _later(self, delay, call, *args):
        self._loop.at(delay, self._if_alive, call, *args)

    def _if_alive(self, call, *args):
        if not self.is_alive:
            return
        if self._loop.now < self.worker.paused_until:
            delay = self.worker.paused_until - self._loop.now
            self._loop.at(delay, self._if_alive, call, *args)
            return
        try:
            call(*args)
        except KilledError:
            self.kill()
            self.worker.restart()

    def _point(self):
        """Pass a point at which the process may be killed."""
        self.worker.points += 1
        if self.worker.points in self.worker.kills:
            raise KilledError

    # The connection.

    def _connect(self):
        self._attempt += 1
        if self.link is not None:
            self.link.end()
        self.link = Link(self._run, self)
        ids = self.session_id, self.center_id
        self.link.send("join", self.worker.name, *ids, self.witnesses)
        self._expect()

    def _expect(self):
        self._attempt += 1
        self._later(_TIMEOUT, self._time_out, self._attempt)

    def _time_out(self, attempt):
        if attempt != self._attempt:
            return
        if self._one_call:
            self._call_once(*self._one_call)
        else:
            self._lose_center()

    def _lose_center(self):
        if self.machine.state in (State.PENDING, State.IN_FLIGHT):
            self.machine.lose_center()
        self._pause = min(2 * self._pause, 1.0)
        self._later(self._pause, self._connect)
        self._attempt += 1

    def receive(self, link, packet):
        """Take a packet of the center."""
        self._if_alive(self._receive, link, packet)

    def _receive(self, link, packet):
        name, *args = packet
        if name == "pulled" and self._one_call:
            self._pulled(*args)
        elif link is not self.link:
            pass  # of a link that has been given up
        elif name == "joined":
            self._joined(*args)
        elif name == "error":
            self._fail(*args)
        elif name == "ended":
            self._attempt += 1
            self._lose_center()
        elif name == "answer":
            self._answered(*args)

    def _call_once(self, *request):
        self._one_call = request
        Link(self._run, self).send(*request)
        self._expect()

    def _beat(self):
        if self.center_id:
            link = Link(self._run, self)
            link.send("alive", self.worker.name, self.session_id)
        self._later(HEARTBEAT_TIMEOUT / 2, self._beat)

    def _joined(self, center_id):
        self._attempt += 1
        self._pause = 0.05
        self._run.ledger.joined(self, center_id)
        self.link.has_joined = True
        self.center_id = center_id
        checkpoint, self._checkpoint = self._checkpoint, None
        if self.machine.state is State.NO_SESSION:
            self._call_once("pull")
        elif checkpoint is not None:  # as `Worker.resend`
            self.machine.prepare()
            self._new_message(self._sent_from)
            self._send()
            self._calls = True
        elif self._message is not None and self._answer is None:
            self._send()

    def _pulled(self, version, params):
        self._one_call = ()
        self._attempt += 1
        self._run.ledger.pulled(self, version, params)
        self.machine.start(counts=Counts())
        self.version, self.x = version, params
        self._later(self._pace(), self._step)

    def _fail(self, error):
        """End the session, whose worker starts again, as its training loop would."""
        self._attempt += 1
        if isinstance(error, errors.OtherHistoryError):
            raise BrokenError(f"a witness of {self.worker.name} is refused: {error}")
        resumes = self.center_id and not self.link.has_joined
        if resumes and isinstance(error, errors.WorkerStateError):
            self._run.ledger.cannot_resume(self, error)
        if isinstance(error, errors.MessageRejectedError):
            self._run.ledger.never_applied(self._message)
        self.machine.leave()
        self.worker.forget()
        self.link.end()
        self.link = None  # its packets are not of the next session
        self._message = self._answer = self._checkpoint = None
        self._one_call, self._calls = (), False
        self._new_session()
        self._later(self._pace(), self._connect)

    # The training loop.

    def _pace(self):
        return self.worker.dice.uniform(0.05, 0.6) * self.worker.slowness

    def _step(self):
        """Make a local step, and call `exchange`."""
        machine = self.machine
        if machine.state is State.NO_SESSION or self._calls:
            return  # it has lost its session meanwhile
        self._calls = True
        self.worker.samples += 1
        self.x = self.x + self.worker.step
        machine.begin_call("exchange", 1)
        self._go_on()

    def _go_on(self):
        """Go on with the call that is in progress, until it waits or returns."""
        machine = self.machine
        if machine.in_flight:
            is_answered = self._answer is not None
            if machine.must_act(_ROUND) and not is_answered:
                return
            if is_answered and machine.may_receive(_ROUND):
                self._adopt()
        if machine.state is State.PENDING:
            if self._answer is None:
                return
            machine.answer()
        if machine.state is State.ANSWERED:
            self._adopt()
        elif machine.state is State.LOCAL and machine.must_act(_ROUND):
            self._prepare()
            if not machine.in_flight:
                return
        self._calls = False
        machine.end_call(returned=True)
        if self.worker.exchanges >= self.worker.quota and not machine.in_flight:
            self._leave()
        elif self.worker.exchanges in self.worker.leaves:
            self.worker.leaves.remove(self.worker.exchanges)
            self._leave()
        else:
            self._later(self._pace(), self._step)

    def _prepare(self):
        machine, first = self.machine, self._first
        machine.prepare()
        self._point()
        self.worker.checkpoint = {
            "token": (self.center_id, self.session_id),
            "completed": machine.completed,
            "exchanges": machine.exchanges,
            "x": self.x,
            "version": self.version,
            "witnesses": self.witnesses,
            "first": first,
            "samples": self.worker.samples,
        }
        self._point()
        self._new_message(first)
        self._first = self.worker.samples
        if machine.sends_in_background:
            machine.send()
        self._send()
        self._point()

    def _new_message(self, first):
        ledger, steps = self._run.ledger, self.machine.message.steps
        message = ledger.message_of(self, self.machine.number, first, steps)
        contribution = message.contribution
        if contribution is None:
            contribution = ledger.contribution(message, self.x)
        self._message, self._answer = message, None
        self._submission = Submission(
            self.machine.number, contribution, self.version, steps=steps
        )

    def _send(self):
        """Send the message, perhaps again; a link that must join does it later."""
        if self.link.has_joined:
            self._message.is_sent = True
            self.link.send("exchange", self._submission)
        self._expect()

    def _answered(self, answer):
        if self._message is None or answer.sequence != self._submission.sequence:
            return  # of a packet that came twice
        if self._answer is not None:
            return
        self._attempt += 1
        self._run.ledger.answered(self, self._message, answer)
        self._point()
        self._answer, self.witnesses = answer, (answer.witness,)
        if self._calls:
            self._go_on()

    def _adopt(self):
        answer, message = self._answer, self._message
        in_flight = self.machine.in_flight
        self.x = self._run.ledger.adopted(message, answer, self.x, in_flight=in_flight)
        self.machine.adopt(resets=bool(answer.rejected))
        if answer.rejected:  # the local steps since the message are lost, too
            self._first = self.worker.samples
        self.version = answer.version
        self._message = self._answer = None
        self.worker.exchanges += 1
        self._point()
        if self.worker.dice.random() < 0.5:  # else the next message does so
            self.link.send("acknowledge", answer.sequence)

    def _leave(self):
        self.machine.leave()
        self.worker.forget()
        link = Link(self._run, self)
        link.send("leave", self.worker.name, self.session_id)
        self.link.end()
        self.is_alive = False
        self.worker.leave()


class Observer:
    """A process that asks for the center's parameters once.

    Attributes:
      seen: version before the reply: none, because a packet may overtake another.
    """

    def __init__(self, run):
        self.name, self.seen, self._run = "observer", 0, run

    def pull(self):
        """Ask for the parameters."""
        Link(self._run, self).send("pull")

    def receive(self, link, packet):
        """Take a packet of the center."""
        if packet[0] == "pulled":
            self._run.ledger.pulled(self, *packet[1:])
            self.seen = 0


class Worker:
    """A worker with its processes, one after the other; or two, which is a mistake."""

    def __init__(self, run, number, plan):
        self.run, self.name = run, f"worker-{number}"
        self.number = number
        self.dice = random.Random(f"{run.scenario.seed} {self.name}")  # noqa: S311
        self.quota, self.kills = plan.exchanges, set(plan.kills)
        self.leaves = list(plan.leaves)
        self.resumes, self.slowness = plan.resumes, plan.slowness
        self.step = np.float32(0.25 * (number + 1))
        self.exchanges = self.samples = self.points = 0
        self.paused_until = 0.0
        self.checkpoint = None
        self.life = None
        self._twins = []
        run.loop.at(plan.starts, self.start)
        for at, seconds in plan.pauses:
            run.loop.at(at, self._pause, seconds)
        for at in plan.cuts:
            run.loop.at(at, self._cut)
        for at in plan.twins:
            run.loop.at(at, self._start_twin)

    @property
    def is_done(self):
        """True if the worker has made all its exchanges and has left."""
        return self.name not in self.run.left

    @property
    def has_twins(self):
        """True if two processes have used the name at once."""
        return bool(self._twins)

    def start(self):
        """Start a process."""
        if not self.is_done:
            self.life = Life(self, self.checkpoint if self.resumes else None)

    def restart(self):
        """Start another process after one was killed."""
        if not self.life.is_alive:
            self.run.loop.at(self.dice.uniform(0.1, 6.0), self.start)

    def leave(self):
        """Record that a process has left: it is done, or comes back."""
        if self.exchanges >= self.quota:
            self.run.left.discard(self.name)
            for life in (self.life, *self._twins):
                life.kill()
        else:
            self.run.loop.at(self.dice.uniform(0.1, 3.0), self.start)

    def forget(self):
        """Remove the checkpoint, because its session is over."""
        self.checkpoint = None

    def _pause(self, seconds):
        self.paused_until = self.run.loop.now + seconds

    def _cut(self):
        if self.life is not None and self.life.is_alive and self.life.link is not None:
            self.life.link.end()

    def _start_twin(self):
        """Start a second process, which may join while the first one reconnects."""
        if self.is_done or self.life is None:
            return
        self._cut()
        self._twins.append(self.life)
        self.life = Life(self)
        self.run.loop.at(5.0, self._twins[-1].kill)
