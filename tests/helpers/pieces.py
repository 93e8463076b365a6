"""Workers of several processes without `jax.distributed`: a session on each thread."""

import contextlib
import functools
import itertools
import uuid

import jax
import numpy as np

from agn_optax import errors, service
from agn_optax.center import Pieces, Region, ShardedCenter, Share, Submission
from helpers.waiting import LIMIT, in_background

_ATTEMPTS = 20  # of an exchange, whose connections a test breaks


def together(calls):
    """Make calls at once; return what each returned, or the error that it raised."""
    futures = [in_background(call, "a process") for call in calls]
    return [future.exception(LIMIT) or future.result() for future in futures]


def results(outcomes):
    """Return the results of `together`; raise the first error."""
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes


def boxes(shape, rng, count):
    """Divide a leaf at random into boxes: pairs of a start and a shape."""
    found = [((0,) * len(shape), tuple(shape))]
    for _ in range(count - 1):
        start, size = found.pop(rng.integers(len(found)))
        axes = [axis for axis, length in enumerate(size) if length > 1]
        if not axes:
            found.append((start, size))
            continue
        axis = rng.choice(axes)
        at = int(rng.integers(1, size[axis]))
        first, rest = list(size), list(size)
        first[axis], rest[axis] = at, size[axis] - at
        middle = list(start)
        middle[axis] += at
        found += [(start, tuple(first)), (tuple(middle), tuple(rest))]
    return found


def random_shares(tree, processes, rng):
    """Return shares whose processes own random boxes, and want random others."""
    owned = [[] for _ in range(processes)]
    wanted = [[] for _ in range(processes)]
    for leaf, array in enumerate(jax.tree.leaves(tree)):
        for box in boxes(np.shape(array), rng, int(rng.integers(1, 7))):
            owned[rng.integers(processes)].append(Region(leaf, *box))
        for own in wanted:
            found = boxes(np.shape(array), rng, int(rng.integers(1, 5)))
            own += [Region(leaf, *box) for box in found if rng.random() < 0.7]
    return shares_of(tree, owned, wanted)


def row_shares(tree, processes):
    """Return shares of which each owns and wants some rows of every leaf."""
    owned = [[] for _ in range(processes)]
    for leaf, array in enumerate(jax.tree.leaves(tree)):
        rows = np.array_split(np.arange(len(array)), processes)
        for own, part in zip(owned, rows, strict=True):
            start = (int(part[0]), *[0] * (array.ndim - 1))
            own.append(Region(leaf, start, (len(part), *array.shape[1:])))
    return shares_of(tree, owned, owned)


def shares_of(tree, owned, wanted):
    """Return a share for each process, given its regions."""
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype), tree)
    group = uuid.uuid4().hex
    return [
        Share(group, i, len(owned), like, tuple(own), tuple(want))
        for i, (own, want) in enumerate(zip(owned, wanted, strict=True))
    ]


def cut(tree, regions):
    """Return the arrays of some regions of a tree."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    return [leaves[region.leaf][region.slices] for region in regions]


@functools.cache
def encoding(codec):
    """Compile the encoding of pieces, by a codec that keeps nothing or begins."""
    return jax.jit(lambda pieces: codec.encode(pieces, codec.init(pieces))[0])


@functools.cache
def decoding(codec):
    """Compile the decoding of pieces."""
    return jax.jit(codec.decode)


class Pod:
    """A worker of several processes, each with a connection of its own.

    Args:
      addresses: the address of the center for each process; a list of addresses for a
        center in shards.
      rule: the rule.
      shares: the shares of the processes.
      name: the worker's name.
      settings: settings of `service.connect`.

    Attributes:
      centers, sessions: those of the processes.
      done: number of exchanges of this session.
    """

    def __init__(self, addresses, rule, shares, name="pod", **settings):
        self.rule, self.shares, self.name = rule, shares, name
        settings = {"timeout": LIMIT, **settings}
        self.centers = [service.connect(at, rule, **settings) for at in addresses]
        self.done, self._attempts = 0, itertools.count()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        results(together([center.close for center in self.centers]))

    def join(self, timeout=None):
        """Join with all processes, in a new session."""
        token = ["", uuid.uuid4().hex]
        if isinstance(self.centers[0], ShardedCenter):
            token = [["", uuid.uuid4().hex] for _ in self.centers[0].centers]
        calls = [
            functools.partial(
                center.join,
                self.name,
                Pieces(share, ()),
                timeout=timeout,
                resume_token=token,
            )
            for center, share in zip(self.centers, self.shares, strict=True)
        ]
        self.sessions, self.done = results(together(calls)), 0
        return self

    def initialize(self, params):
        """Set the first parameters, each process its own pieces."""
        calls = [
            functools.partial(
                center.initialize,
                Pieces(share, cut(params, share.owned)),
                worker=self.name,
            )
            for center, share in zip(self.centers, self.shares, strict=True)
        ]
        results(together(calls))

    def exchange(self, contribution, *, anchor_version, **fields):
        """Exchange a whole contribution, in pieces; return the answers."""
        encoded = [self.encoded(contribution, share) for share in self.shares]
        return self.exchange_pieces(encoded, anchor_version=anchor_version, **fields)

    def encoded(self, contribution, share):
        """Return a process's pieces of a contribution, each encoded by itself."""
        pieces, codec = cut(contribution, share.owned), self.rule.codec
        return pieces if codec.is_identity else encoding(codec)(pieces)

    def exchange_pieces(self, pieces, **fields):
        """Exchange each process's pieces, and begin anew after broken connections."""
        self.done += 1
        self._attempts = itertools.count()
        return self.repeat(pieces, **fields)

    def repeat(self, pieces, **fields):
        """Make further attempts of the last exchange until all have one version."""
        for attempt in itertools.islice(self._attempts, _ATTEMPTS):
            outcomes = self.attempt(pieces, attempt, **fields)
            if any(isinstance(o, errors.CenterUnreachableError) for o in outcomes):
                continue
            answers = results(outcomes)
            if len({each.version for each in answers}) == 1:
                for session in self.sessions:
                    session.acknowledge(self.done)
                return answers
        raise AssertionError("the processes have not got one version")

    def attempt(self, pieces, number=0, **fields):
        """Make one attempt; return the answer, or the error, of each process."""
        messages = self.submissions(pieces, number, **fields)
        calls = zip(self.sessions, messages, strict=True)
        return together([functools.partial(answer, *call) for call in calls])

    def submissions(self, pieces, attempt=0, **fields):
        """Return the submission of each process."""
        fields = {"anchor_version": 0, **fields, "attempt": attempt}
        return [Submission(self.done, own, **fields) for own in pieces]

    def whole(self, records):
        """Return the known elements of answers or snapshots, and check that they agree.

        Elements that no process wants are NaN.
        """
        leaves, treedef = jax.tree.flatten(self.shares[0].like)
        found = [np.full(leaf.shape, np.nan, np.float64) for leaf in leaves]
        for share, record in zip(self.shares, records, strict=True):
            for region, piece in zip(share.wanted, record.params, strict=True):
                known = found[region.leaf][region.slices]
                piece = np.asarray(piece, np.float64)
                assert np.all(np.isnan(known) | (known == piece))
                found[region.leaf][region.slices] = piece
        return jax.tree.unflatten(treedef, found)

    def pull(self, attempt=0):
        """Return the snapshot that each process pulls."""
        return results(
            together([functools.partial(s.pull, attempt, LIMIT) for s in self.sessions])
        )


def answer(session, submission):
    """Exchange, and do not acknowledge the answer."""
    session.submit(submission)
    return session.collect(submission.sequence)


@contextlib.contextmanager
def pod(address, rule, shares, **settings):
    """Yield a worker of several processes that has joined the center at an address."""
    with Pod([address] * len(shares), rule, shares, **settings) as made:
        yield made.join()
