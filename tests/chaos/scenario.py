"""Scenarios: centers, workers and the faults they meet, drawn from a seed."""

import dataclasses
import random

from chaos import model

LEASE = 4.0  # seconds
TIMEOUT = 3.5  # seconds after which a silent center is tried on another connection
BEGIN, END = 0.3, 4.0  # seconds in which faults begin

_MODES = {
    "asynchronous": [],
    "versions": ["--mode=bounded", "--max-versions-behind=3"],
    "rounds": ["--mode=bounded", "--max-rounds-ahead=2"],
    "synchronous": ["--mode=synchronous"],
    "quorum": ["--mode=synchronous", "--quorum=2", "--grace=0.05"],
    "quorum-drop": ["--mode=synchronous", "--quorum=2", "--grace=0.05", "--late=drop"],
}
# Elements of a worker: a message that fits into a packet with its head, one that goes
# through shared memory, and one that fills the buffers of sockets.
_SLOTS = {"small": 64, "medium": 8_000, "large": 400_000}

_NETWORK = ["cut", "outage", "cut inside", "delay", "throttle", "hold"]
_LOST = ["strand", "close half", "replay"]
_PROCESS = ["kill", "stop", "leave"]
_CENTER = ["kill center", "stop center", "drain center", "disk"]


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault, with its time and its target.

    Attributes:
      at, seconds: beginning and duration in seconds; 0 for an instantaneous fault.
      kind: name of the fault, see `runner.Run`.
      target: number of the worker, of the center, or of the connection between them.
      amount: seconds of delay, bytes a second, bytes until the cut, or seconds that a
        clock jumps; or whether a killed worker is restarted.
      there, back: whether it affects the direction to the center, and from it.
    """

    at: float
    kind: str
    target: int
    seconds: float = 0.0
    amount: float = 0.0
    there: bool = True
    back: bool = True

    def __str__(self):
        lasts = f" for {self.seconds:.1f} s" if self.seconds else ""
        return f"{self.at:.1f} s: {self.kind} {self.target}{lasts}"


@dataclasses.dataclass(frozen=True)
class Scenario:
    """The settings and faults of one run.

    Attributes:
      delay: local steps that a fragment is in flight; None without fragments.
      resumes: whether workers resume from checkpoints, see `Resumable`.
      secure: whether connections use TLS and tokens.
      weighs: whether messages claim weights, which the center adds up.
      rejects: whether some steps are bad, and the center rejects their messages.
    """

    seed: int
    mode: str
    rule: str
    codec: str
    transports: tuple[str, ...]  # of each worker
    centers: str  # "one" or "shards"
    durability: str  # "none" or "journal"
    size: str
    overlap: bool
    patience: int | None
    end: str  # of the centers: "drain" or "kill"
    faults: tuple[Fault, ...]
    delay: int | None = None
    resumes: bool = False
    secure: bool = False
    weighs: bool = False
    rejects: bool = False
    recovers: float = 2 * LEASE  # s until which survivors must exchange again

    @property
    def slots(self):
        return _SLOTS[self.size]

    @property
    def workers(self):
        return len(self.transports)

    @property
    def options(self):
        """Options of the command for any center."""
        named = model.rule_options(self.rule, self.codec, self.weighs)
        return [*named, f"--lease={LEASE}"]

    @property
    def mode_options(self):
        """Further options, for a center that workers connect to."""
        rejected = [f"--reject-norm={model.REJECTED_NORM}"] if self.rejects else []
        return _MODES[self.mode] + rejected

    @property
    def is_sparse(self):
        """True if messages leave out elements, which a residual keeps."""
        return self.codec in model.SPARSE

    @property
    def burst(self):
        """Steps in a group: the first moves as many slots, the others none."""
        return 2 if self.is_sparse else 1

    @property
    def is_lossy(self):
        """True if a center may forget acknowledged steps."""
        forgets = {
            "journal": set(),
            "none": {"kill center", "drain center"},
        }[self.durability]
        return any(fault.kind in forgets for fault in self.faults)

    @property
    def conserves(self):
        """True if elastic averaging must conserve the sum of center and workers.

        It need not if an answer was given up after its message was applied: the retry
        is answered with a later center, so the worker and the center move differently.
        """
        away = sum(
            TIMEOUT if fault.kind in ("strand", "close half") else fault.seconds
            for fault in self.faults
        )
        restarts = {"kill center", "drain center", "disk"}
        is_the_same = not any(fault.kind in restarts for fault in self.faults)
        return self.rule == "easgd" and is_the_same and away < LEASE - 0.5

    def __str__(self):
        patience = "" if self.patience is None else f" patience {self.patience}"
        return (
            f"{self.rule} {self.mode} {'/'.join(self.transports)} {self.centers} "
            f"{self.durability} {self.codec} {self.size}"
            f"{' overlap' * self.overlap}{patience}"
            f"{'' if self.delay is None else f' fragments delay {self.delay}'}"
            f"{' resumable' * self.resumes}{' secure' * self.secure}"
            f"{' weights' * self.weighs}{' rejections' * self.rejects}"
            f", {self.end} at the end"
        )


# A scenario without faults, as a base for others.
PLAIN = Scenario(
    seed=-1,
    mode="asynchronous",
    rule="downpour",
    codec="none",
    transports=("memory", "socket", "grpc"),
    centers="one",
    durability="journal",
    size="small",
    overlap=False,
    patience=None,
    end="kill",
    faults=(),
)


def drawn(seed):
    """Return the scenario of a seed."""
    rng = random.Random(seed)  # noqa: S311 reproducible
    rule = rng.choices(["downpour", "easgd"], [4, 1])[0]
    centers = rng.choices(["one", "shards"], [2, 1])[0]
    elastic = rule == "easgd"
    mode = rng.choice(["asynchronous", "rounds"] if elastic else list(_MODES))
    durability = rng.choices(["none", "journal"], [1, 4])[0]
    if elastic:
        durability = "journal"
    overlap = rng.random() < 0.3
    one_by_one = mode in ("asynchronous", "versions", "rounds")
    delay = None
    # In rounds, a worker that joins late may wait for one fragment, and the others for
    # the other: see docs/reliability.md.
    if centers == "shards" and one_by_one and not elastic and rng.random() < 0.8:
        delay = 0 if overlap else rng.choice([0, 1, 2])
    weighs = centers == "one" and one_by_one and not elastic and rng.random() < 0.3
    codec = "none" if elastic or weighs else rng.choice(list(model.CODECS))
    # After a dropped or rejected message a worker's steps are not all in turn.
    drops = mode in ("versions", "quorum-drop")
    in_turn = not elastic and codec not in model.SPARSE and not drops
    resumes = (
        in_turn and durability == "journal" and delay is None and rng.random() < 0.4
    )
    rejects = not elastic and not resumes and rng.random() < 0.25
    chosen = Scenario(
        seed=seed,
        mode=mode,
        rule=rule,
        codec=codec,
        transports=tuple(
            rng.choice(["memory", "socket", "grpc"]) for _ in range(rng.randint(2, 4))
        ),
        centers=centers,
        durability=durability,
        size=rng.choices(list(_SLOTS), [3, 3, 1])[0],
        overlap=overlap,
        patience=None if overlap or rng.random() < 0.6 else 0,
        end=rng.choice(["drain", "kill"]) if durability == "journal" else "drain",
        faults=(),
        delay=delay,
        resumes=resumes,
        secure=rng.random() < 0.3,
        weighs=weighs,
        rejects=rejects,
    )
    faults = [_fault(rng, chosen) for _ in range(rng.randint(1, 4))]
    faults.sort(key=lambda fault: fault.at)
    return dataclasses.replace(chosen, faults=tuple(faults))


def _fault(rng, chosen):
    kinds = [*_NETWORK, *_NETWORK, *_LOST, *_PROCESS, *_PROCESS, *_CENTER, "clock"]
    if chosen.rule == "easgd":  # the parameters of a killed worker are unknown
        kinds = [kind for kind in kinds if kind not in ("kill", "leave")]
    if chosen.durability != "journal":
        kinds.remove("disk")
    kind = rng.choice(kinds)
    at = rng.uniform(BEGIN, END)
    directions = rng.choice([(True, True), (True, False), (False, True)])
    if kind in ("strand", "close half", "cut inside"):
        directions = rng.choice([(True, False), (False, True)])
    target = rng.randrange(chosen.workers)
    if kind in _CENTER:
        target = rng.randrange({"one": 1, "shards": 2}[chosen.centers])
    lasting = ("outage", "delay", "throttle", "hold", "stop", "stop center")
    return Fault(
        at,
        kind,
        target,
        seconds=rng.uniform(0.2, 1.5 * LEASE) if kind in lasting else 0.0,
        amount={
            "delay": rng.uniform(0.01, 0.3),
            "throttle": 10 ** rng.uniform(2, 6),
            "cut inside": 10 ** rng.uniform(1, 5.5),
            "clock": rng.choice([-86400.0, -5.0, 5.0, 86400.0]),
            "kill": rng.random() < 0.7,
        }.get(kind, 0.0),
        there=directions[0],
        back=directions[1],
    )
