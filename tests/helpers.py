"""Oracles, which use neither JAX nor the package's graphs, and small programs for tests."""

import contextlib
import functools as ft
import heapq
import itertools as it
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prism_jax.data import Job, Model
from prism_jax.engine import simulate
from prism_jax.host import on_host
from prism_jax.latency import LogNormal
from prism_jax.law import LEVELS, Errors, Law, counted, law_of
from prism_jax.lowering import job_parts
from prism_jax.lowering._sinks import Sink
from prism_jax.profile import Profile, compile_profile
from prism_jax.program import Network, Program, Stall, Variability, compile_program
from prism_jax.program._assemble import assemble
from prism_jax.schedule import OneFOneB, OpGraph, op_graph
from prism_jax.workload import Block, Kernel, Segment, Workload, lower, rows_of


def event_loop_ends(predecessors, latencies) -> list[float]:
    """The end of every op, by an event loop: an op starts when the last it waits for has ended."""
    successors = [[] for _ in predecessors]
    waiting = [len(before) for before in predecessors]
    for op, before in enumerate(predecessors):
        for p in before:
            successors[p].append(op)
    ends = [0.0] * len(predecessors)
    events = [(latencies[op], op) for op, count in enumerate(waiting) if not count]
    heapq.heapify(events)
    while events:
        now, op = heapq.heappop(events)
        ends[op] = now
        for s in successors[op]:
            waiting[s] -= 1
            if not waiting[s]:
                heapq.heappush(events, (now + latencies[s], s))
    assert not any(waiting)
    return ends


def random_dag(seed: int, num_ops: int = 40, fan_in: int = 4) -> list[tuple[int, ...]]:
    """Predecessors of a random graph; some ops wait for nothing, some are nobody's predecessor."""
    rng = np.random.default_rng(seed)
    predecessors: list[tuple[int, ...]] = [()]
    for op in range(1, num_ops):
        count = min(op, int(rng.integers(0, fan_in + 1)))
        predecessors.append(tuple(int(p) for p in rng.choice(op, count, replace=False)))
    return predecessors


def graph_of(predecessors, *, rank=None, microbatch=None, last=None) -> OpGraph:
    """An op graph of forward ops only, by default all on one rank that ends when everything has."""
    num_ops = len(predecessors)
    zeros = np.zeros(num_ops, np.int64)
    rank = zeros if rank is None else np.asarray(rank)
    ranks = int(rank.max()) + 1
    orders = tuple(tuple(int(op) for op in np.flatnonzero(rank == r)) for r in range(ranks))
    return OpGraph(
        phase=np.full(num_ops, "F"),
        stage=rank,
        microbatch=zeros if microbatch is None else np.asarray(microbatch),
        rank=rank,
        peer=zeros - 1,
        other_stage=zeros - 1,
        other_microbatch=zeros - 1,
        backward=np.zeros(num_ops, bool),
        predecessors=tuple(tuple(p) for p in predecessors),
        orders=orders,
        last=orders if last is None else last,
    )


def by_hand(folder):
    """The folder of a profile, as one that was written by hand: without a digest."""
    path = folder / "profile.toml"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if not line.startswith("digest = ")))
    return folder


def one_kernel(kind: str, mean: float, link: str | None = None):
    """A block of one kernel that every member runs, or of one collective."""
    kernel = Kernel(kind, f"{mean!r}", mean, link)
    if link is not None:
        return ((Segment((), kernel), 1),)
    return ((Segment(((kernel, 1),)), 1),)


def pipeline_program(
    schedule,
    *,
    forward: float | np.ndarray = 1.0,
    backward: float | np.ndarray = 2.0,
    send_recv: float = 0.05,
    reduction: Block = (),
    variability: Variability | None = None,
    **options,
):
    """A program of a schedule in which each op is one kernel; costs are per stage. Each rank has
    the reduction at its end.
    """
    graph = op_graph(schedule)
    forward = np.broadcast_to(np.asarray(forward, float), schedule.num_stages)
    backward = np.broadcast_to(np.asarray(backward, float), schedule.num_stages)
    forwards = [one_kernel("gemm", float(x)) for x in forward]
    backwards = [one_kernel("gemm", float(x)) for x in backward]
    transfer = one_kernel("send_recv", send_recv, "network")
    blocks = [
        transfer if phase == "SR" else (forwards if phase == "F" else backwards)[stage]
        for phase, stage in zip(graph.phase, graph.stage, strict=True)
    ]
    sinks = [Sink(rank, last, reduction) for rank, last in enumerate(graph.last)]
    return assemble(graph, blocks, sinks=sinks, variability=variability, **options)


def rich_program(num_replicas: int = 1, *, schedule=None, **changes):
    """The program with everything in it: all laws, a reduction, a tail. `changes` replace laws."""
    schedule = OneFOneB(3, 4) if schedule is None else schedule
    laws = {
        "residual": {"gemm": lognormal(0.05), "send_recv": lognormal(0.3)},
        "rank": lognormal(0.02),
        "step": lognormal(0.01),
        "microbatch": lognormal(0.03),
        "network": Network(jnp.asarray(0.1), jnp.asarray(3.0)),
        "stalls": {"gemm": Stall(jnp.asarray(2e-4), lognormal(0.5))},
    }
    return pipeline_program(
        schedule,
        variability=Variability(**(laws | changes)),
        num_replicas=num_replicas,
        network_links=("network",),
        reduction=one_kernel("reduce_scatter", 0.5, "network"),
        tail=one_kernel("optimizer", 0.3),
    )


def compile_with(job: Job, variability: Variability) -> Program:
    """The program of a job with other laws."""
    parts = job_parts(job)
    rest = {"training": parts.training, "kernels": parts.kernels, "variability": variability}
    return compile_program(parts.model, parts.layout, parts.schedule, parts.cluster, **rest)


def law_of_profile(profile: Profile, num_samples: int = 20_000) -> Law:
    """The law of the step time of a fitted profile."""
    program = compile_profile(profile)
    return simulate(program, num_samples=num_samples, key=jax.random.key(0), sampling="plain")


def lower_job(job: Job) -> Workload:
    """The workload of a job whose stages are dealt to ranks in turns."""
    ranks = tuple(range(job.layout.pp)) * job.schedule.virtual_stages
    return lower(job_parts(job), ranks)


def kernels_of(block: Block) -> Counter[Kernel]:
    """How often each kernel of a block runs, collectives too."""
    counts: Counter[Kernel] = Counter()
    for segment, times in block:
        for row, _ in rows_of(segment):
            for kernel, count in row:
                counts[kernel] += count * times
    return counts


def flop_of(blocks: Sequence[Block], *kinds: str) -> float:
    """The operations of blocks on one GPU, of all kernels or of those of some kinds."""
    kernels = it.chain.from_iterable(kernels_of(block).items() for block in blocks)
    return sum(k.flop * count for k, count in kernels if not kinds or k.kind in kinds)


def small_model(**changes: Any) -> Model:
    """A decoder of width 1,024 with grouped queries, of which tests say the layers."""
    sizes = {"hidden_size": 1024, "vocab_size": 32000, "ffn_size": 4096}
    sizes |= {"num_heads": 8, "num_kv_heads": 2}
    kinds = {"activation": "swiglu", "position": "rotary", "norm": "rmsnorm"}
    options: Any = sizes | kinds | {"bias": False, "tied_embeddings": False}
    return Model(**options | changes)


def lognormal(sigma: float) -> LogNormal:
    """A log-normal factor of median one."""
    return LogNormal(jnp.ones(()), jnp.asarray(sigma, jnp.result_type(float)))


def negative_spread() -> LogNormal:
    """A law that was changed after it was made."""
    return eqx.tree_at(lambda law: law.sigma, lognormal(0.1), jnp.full((), -0.1))


def made_law(steps: np.ndarray | None = None) -> Law:
    """A law of made steps, which takes no simulation."""
    if steps is None:
        steps = np.random.default_rng(0).gamma(4.0, 0.25, 500)
    steps = np.asarray(steps, float)
    levels = (np.full(len(LEVELS), each) for each in (0.01, 0.0, 40.0, 20.0))
    errors = Errors(0.1, 0.1, 0.0, 0.0, 40.0, 40.0, 500.0, *levels)
    about = {"requested": 500, "effective_samples": 500.0, "program": "", "keys": ((0, 0),)}
    about |= {"compile_s": 0.0, "run_s": 1.0}
    return law_of(counted(steps, len(steps), np), len(steps), errors, **about)


def block_program(block, members: int, spread: float, gpus: float, *, network=None, **options):
    """A program of one block, whose kernels and GPUs vary."""
    residual = {"norm": 2 * spread, "gemm": spread}
    residual |= {"all_gather": 2 * spread, "reduce_scatter": 3 * spread}
    variability = Variability(
        residual={kind: lognormal(sigma) for kind, sigma in residual.items()},
        rank=lognormal(gpus),
        network=network,
    )
    options |= {"variability": variability, "group_size": members}
    return assemble(graph_of([()]), [block], **options)


def side_by_side(compute, longest, contention):
    """When both compute and the longest of the collectives beside it end, if each is slowed by the
    other for as long as both run (design 5.10). NumPy.
    """
    a, b = contention
    x, y = compute * (1 + a), longest * (1 + b)
    return np.maximum(x + (y - x) / (1 + b), y + (x - y) / (1 + a))


@contextlib.contextmanager
def compilations():
    """What XLA compiles meanwhile."""
    compiled: list[str] = []

    def listen(event: str, duration_secs: float, **kwargs: str | int):
        del duration_secs, kwargs
        if "backend_compile" in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def by_numpy(function):
    """A function of arrays, evaluated as tables are: by NumPy, without compiling it."""
    return ft.partial(on_host, function)


def refusal(call: Callable[[], Any], words: str, error: type[Exception] = ValueError) -> str:
    """The sentence in which a call is refused; its words, between ` ... `, are there in order."""
    with pytest.raises(error) as raised:
        call()
    message = str(raised.value)
    assert "\n" not in message
    assert len(message) < 700  # Of which a path is a part.
    has_in_order(message, words)
    return message


def has_in_order(message: str, words: str) -> None:
    """Asserts that the words, between ` ... `, are in a message in this order."""
    start = 0
    for part in words.split(" ... "):
        start = message.find(part, start)
        assert start >= 0, f"{part!r} is not where it is expected in {message!r}"
        start += len(part)
