"""One of two processes of a worker that make mistakes.

python sharded_mistakes.py COORDINATOR PROCESS ADDRESS SHARDS GUARDED STRICT

SHARDS are the addresses of a center in two shards. The center at GUARDED asks for a
token of TOKENS, and the one at STRICT rejects all messages.

It prints a line of JSON for each mistake: its name, the error, and the seconds it took.
"""

import json
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import agn_optax
from agn_optax import Fragments, codecs, service

RULE = agn_optax.rules.downpour()
TIMEOUT = 4.0  # s, of a connection
ADDRESSES = {}  # of the other centers
TOKENS = {"anna": "the-token-of-anna", "bert": "the-token-of-bert"}
MISTAKES = {}


def mistake(function):
    """Register a function that must raise in both processes."""
    MISTAKES[function.__name__] = function
    return function


FIRST = P("x")


def arrays(spec=FIRST, rows=8, dtype=np.float32):
    mesh = Mesh(np.array(jax.devices()), ("x",))
    whole = np.ones((rows, 2), dtype)
    sharding = NamedSharding(mesh, spec)
    return jax.make_array_from_callback(whole.shape, sharding, lambda i: whole[i])


def worker_of(center, name="anna", period=1, **settings):
    inner, settings = optax.sgd(1.0), {"patience": 0, **settings}
    return agn_optax.Worker(center, inner, period=period, name=name, **settings)


def step(worker, params, state):
    updates, state = worker.tx.update(jnp.ones_like(params), state, params)
    return optax.apply_updates(params, updates), state


@mistake
def names_differ(center, process):
    worker_of(center, f"anna-{process}").start(arrays())


@mistake
def shardings_differ(center, process):
    worker_of(center).start(arrays([P("x"), P(None, "x")][process]))


@mistake
def shapes_differ(center, process):
    worker_of(center).start(arrays(rows=8 + 2 * process))


@mistake
def messages_are_rejected_too_often(center, process):
    with service.connect(ADDRESSES["strict"], RULE, timeout=TIMEOUT) as own:
        worker = worker_of(own)
        loop = worker.exchange(*step(worker, *worker.start(arrays())))
        assert worker.rejected == 1
        worker.exchange(*step(worker, *loop))


@mistake
def model_is_another_one(center, process):
    worker_of(center).start(arrays(rows=6))


@mistake
def rule_differs(center, process):
    rule = [RULE, agn_optax.rules.dynsgd()][process]
    with service.connect(center.address, rule, timeout=TIMEOUT) as own:
        worker_of(own).start(arrays())


@mistake
def period_differs(center, process):
    worker_of(center, period=2 + process).start(arrays())


@mistake
def overlap_differs(center, process):
    worker_of(center, overlap=bool(process)).start(arrays())


@mistake
def patience_differs(center, process):
    worker_of(center, patience=[None, 3][process]).start(arrays())


@mistake
def chief_differs(center, process):
    worker_of(center).start(arrays(), chief=process == 0)


@mistake
def one_process_resumes(center, process):
    worker = worker_of(center)
    saved, token = worker.save(*worker.start(arrays())), worker.resume_token
    if process:
        worker.restore(saved, resume_token=token)
    else:
        worker.start(arrays())


@mistake
def token_is_wrong(center, process):
    token = [TOKENS["anna"], "x" * 16][process]
    with service.connect(
        ADDRESSES["guarded"], RULE, timeout=TIMEOUT, token=token
    ) as own:
        worker_of(own).start(arrays())


@mistake
def token_is_of_another_worker(center, process):
    token = TOKENS[["anna", "bert"][process]]
    with service.connect(
        ADDRESSES["guarded"], RULE, timeout=TIMEOUT, token=token
    ) as own:
        worker_of(own).start(arrays())


def start_with_shards(addresses, params=None, fragments=None):
    with service.connect(addresses, RULE, timeout=TIMEOUT) as center:
        # Each process has a half of all rows, which are those of both shards.
        first = arrays(P(None, "x")) if params is None else params
        worker_of(center, period=4, fragments=fragments).start(first)


@mistake
def shards_are_in_another_order(center, process):
    start_with_shards(ADDRESSES["shards"].split(",")[:: [1, -1][process]])


@mistake
def number_of_shards_differs(center, process):
    start_with_shards([ADDRESSES["shards"], ADDRESSES["shards"].split(",")[0]][process])


@mistake
def centers_differ(center, process):
    start_with_shards([center.address, ADDRESSES["shards"].split(",")[0]][process])


@mistake
def one_process_has_fragments(center, process):
    pair = {"a": arrays(), "b": arrays()}
    start_with_shards(ADDRESSES["shards"], pair, [None, Fragments(2)][process])


@mistake
def fragments_have_other_delays(center, process):
    pair = {"a": arrays(), "b": arrays()}
    start_with_shards(ADDRESSES["shards"], pair, Fragments(2, delay=process))


@mistake
def fragments_of_the_center_differ(center, process):
    pair = {"a": arrays(), "b": arrays()}
    given = Fragments([["a", "b"], ["b", "a"]][process])
    with service.connect(
        ADDRESSES["shards"], RULE, timeout=TIMEOUT, fragments=given
    ) as own:
        worker_of(own).start(pair)


@mistake
def some_leaves_are_local(center, process):
    worker_of(center).start({"global": arrays(), "local": jnp.ones(3)})


@mistake
def center_is_in_this_process(center, process):
    local = agn_optax.LocalCenter(RULE, jnp.ones((8, 2)))
    worker_of(local).start(arrays())


@mistake
def codec_reads_the_whole_tree(center, process):
    whole = codecs.Codec(
        lambda params: optax.EmptyState(),
        lambda tree, state: (tree, state),
        lambda sent, like: sent,
        name="whole",
        reads="tree",
    )
    center.rule, kept = agn_optax.rules.downpour(codec=whole), center.rule
    try:
        worker_of(center).start(arrays())
    finally:
        center.rule = kept


@mistake
def one_process_exchanges_more_often(center, process):
    worker = worker_of(center)
    params, state = worker.start(arrays())
    if process:  # the other one is busy elsewhere, and does not leave
        time.sleep(4 * TIMEOUT)
        raise RuntimeError("the process that exchanges less often")
    worker.exchange(*step(worker, params, state))


@mistake
def steps_differ(center, process):
    worker = worker_of(center)
    params, state = worker.start(arrays())
    worker.exchange(*step(worker, params, state), steps=1 + process)


@mistake
def weights_differ(center, process):
    worker = worker_of(center)
    params, state = worker.start(arrays())
    worker.exchange(*step(worker, params, state), weight=1.0 + process)


@mistake
def exchange_is_traced(center, process):
    worker = worker_of(center)
    loop = worker.start(arrays())
    jax.jit(lambda loop: worker.exchange(*loop))(loop)


@mistake
def one_process_does_not_start(center, process):
    if process:
        time.sleep(4 * TIMEOUT)
        raise RuntimeError("the process that does not start")
    worker_of(center).start(arrays())


RECOVERIES = {}


def recovery(function):
    """Register a function that makes one exchange in the end."""
    RECOVERIES[function.__name__] = function
    return function


def raises(call):
    """Call a function that must raise."""
    try:
        call()
    except Exception:
        return
    raise AssertionError("nothing was raised")


@recovery
def one_process_fails_before_it_sends(center, process):
    worker = worker_of(center)

    def full_disk(*arguments):
        raise OSError("the disk is full")

    loop = step(worker, *worker.start(arrays()))
    worker.before_send = full_disk if process else None
    raises(lambda: worker.exchange(*loop))
    worker.before_send = None
    multihost_utils.sync_global_devices("once more")
    worker.exchange(*loop)
    worker.leave()


@recovery
def one_process_fails_to_start(center, process):
    worker = worker_of(center)
    params = arrays()
    raises(lambda: worker.start({"w": np.ones(3)} if process else params))
    multihost_utils.sync_global_devices("start again")
    worker.exchange(*step(worker, *worker.start(params)))
    worker.leave()


@recovery
def name_is_taken_at_first(center, process):
    worker = worker_of(center, "bert")
    other = service.connect(center.address, RULE)
    if process == 0:
        other.join("bert")
    multihost_utils.sync_global_devices("taken")
    raises(lambda: worker.start(arrays(), chief=None))
    other.close()  # its session leaves
    multihost_utils.sync_global_devices("free")
    worker.exchange(*step(worker, *worker.start(arrays(), chief=None)))
    worker.leave()


@recovery
def token_is_right(center, process):
    with service.connect(ADDRESSES["guarded"], RULE, token=TOKENS["anna"]) as own:
        worker = worker_of(own)
        worker.exchange(*step(worker, *worker.start(arrays())))
        worker.leave()


def main():
    coordinator, process, address = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    ADDRESSES.update(zip(("shards", "guarded", "strict"), sys.argv[4:], strict=True))
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(coordinator, 2, process)
    with service.connect(address, RULE, timeout=TIMEOUT) as center:
        for name, make in MISTAKES.items():
            multihost_utils.sync_global_devices(name)
            begin = time.monotonic()
            try:
                make(center, process)
                error = "nothing was raised"
            except Exception as raised:
                error = f"{type(raised).__name__}: {raised}"
            report(name, error, time.monotonic() - begin)
        for name, recover in RECOVERIES.items():
            multihost_utils.sync_global_devices(name)
            begin = time.monotonic()
            recover(center, process)
            report(name, "", time.monotonic() - begin)


def report(*result):
    sys.stdout.write(f"\nRESULT {json.dumps(result)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
