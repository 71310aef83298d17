"""Exchanges with experts beside the compute of another microbatch."""

import itertools as it
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from prism_jax.data import load_job
from prism_jax.prediction import predict
from prism_jax.program import Variability
from prism_jax.program._assemble import assemble
from prism_jax.replica import make_plan
from prism_jax.workload import Kernel, Segment, block_mean, pair
from prism_jax.workload._block import Passes

from .helpers import graph_of, kernels_of, lognormal, lower_job, side_by_side


_MEMBERS = 4


def _gemm(name: str, mean: float) -> Kernel:
    return Kernel("gemm", name, mean)


def _layer(name: str, seconds) -> tuple[Segment, ...]:
    """What a layer runs before, between and after its two exchanges, which take the other two."""
    before, sent, experts, back, after = seconds

    def until(what: str, mean: float, exchange: float) -> Segment:
        collective = Kernel("all_to_all", f"{name} {what}", exchange, "network", group="ep")
        return Segment(((_gemm(f"{name} {what}", mean), 1),), collective, (), _MEMBERS)

    return (
        until("before", before, sent),
        until("experts", experts, back),
        Segment(((_gemm(f"{name} after", after), 1),)),
    )


def _passes(forward, backward, contention=(0.0, 0.0)) -> Passes:
    """One stage of layers with these latencies, an array of five for each."""

    def ordered(name, layers):
        found = ((_layer(f"{name}{i}", each.tolist()), 1) for i, each in enumerate(layers))
        return ((tuple(found), 0.0),)

    return Passes(ordered("F", forward), ordered("B", backward), contention)


def _paired(passes, *stages) -> Any:
    return pair(passes, *(stages or (0, 0)))


def _by_events(forward, backward) -> float:
    """The end of two streams, op by op: each waits for the op before it on its stream, and for the
    op before it of its own microbatch."""
    first, second = (_alternating(layers) for layers in (forward, backward))
    # The backward's first part runs ahead; then the two take turns on both streams.
    turns = list(it.chain.from_iterable(zip(first, second[1:], strict=False)))
    turns = [(second[0], 1), *((one, i % 2) for i, one in enumerate(turns)), (first[-1], 0)]
    at = {0: 0, 1: 0}
    done, free = [0.0, 0.0], {"compute": 0.0, "exchange": 0.0}
    for seconds, microbatch in turns:
        stream = ("compute", "exchange")[at[microbatch] % 2]
        end = max(done[microbatch], free[stream]) + seconds
        done[microbatch] = free[stream] = end
        at[microbatch] += 1
    return max(done)


def _alternating(layers) -> list[float]:
    """Compute and exchanges in turn; what ends a layer and what starts the next are one part."""
    found = [0.0]
    for before, sent, experts, back, after in layers.tolist():
        found[-1] += before
        found += [sent, experts, back, after]
    return found


@pytest.mark.parametrize("layers", [1, 2, 5])
@pytest.mark.parametrize("seed", range(5))
def test_a_pair_ends_as_its_two_streams_do(layers, seed):
    forward, backward = np.random.default_rng(seed).gamma(2.0, 1e-3, (2, layers, 5))
    block = _paired(_passes(forward, backward))
    assert block_mean(block) == pytest.approx(_by_events(forward, backward))


def test_exchanges_that_take_no_time_or_all_of_it():
    rng = np.random.default_rng(7)
    forward, backward = rng.gamma(2.0, 1e-3, (2, 3, 5))
    for layers in (forward, backward):
        layers[:, [1, 3]] = 0
    block = _paired(_passes(forward, backward))
    assert block_mean(block) == pytest.approx(np.sum(forward) + np.sum(backward))
    for layers in (forward, backward):
        layers[:] = [0, 1e-3, 0, 2e-3, 0]
    block = _paired(_passes(forward, backward))
    assert block_mean(block) == pytest.approx(np.sum(forward) + np.sum(backward))


@pytest.mark.parametrize("counts", [(1, 3), (3, 1)])
def test_surplus_exchanges_of_a_paired_pass_are_not_hidden(counts):
    rng = np.random.default_rng(3)
    forward, backward = (rng.gamma(2.0, 1e-3, (count, 5)) for count in counts)
    passes = _passes(forward, backward)
    block = _paired(passes)
    whole = [part for ordered, _ in (*passes.forward, *passes.backward) for part in ordered]
    serial = tuple((one, count) for segments, count in whole for one in segments)
    assert kernels_of(block) == kernels_of(serial)
    both = min(counts)
    overlapped = _paired(_passes(forward[:both], backward[:both]))
    more = np.sum(forward[both:]) + np.sum(backward[both:])
    # At most what starts the next layer runs beside the last exchange of those before.
    left = block_mean(block) - block_mean(overlapped)
    assert more - backward[both:, 0].sum() - 1e-12 <= left <= more + 1e-12


def test_without_exchanges_there_is_nothing_to_overlap():
    alone = (((Segment(((_gemm("a", 1.0), 1),)),), 2),)
    stage = (alone, 0.0)
    assert pair(Passes((stage,), (stage,), (0.0, 0.0)), 0, 0) is None


@pytest.mark.parametrize("contention", [(0.0, 0.0), (0.2, 0.0)])
def test_a_pair_equals_every_kernel_drawn(contention):
    """Of four ranks with GPUs of their own, whose slowest all wait for after each column; what is
    behind the last one is waited for at the first of the next pair.
    """
    rng, samples, sigma, gpu = np.random.default_rng(0), 40_000, 0.03, 0.02
    forward, backward = np.random.default_rng(1).uniform(0.8e-3, 1.2e-3, (2, 2, 5))
    block = _paired(_passes(forward, backward, contention))
    variability = Variability(
        residual={"gemm": lognormal(sigma), "all_to_all": lognormal(3 * sigma)}, rank=lognormal(gpu)
    )
    program = assemble(
        graph_of([()]), [block], variability=variability, members=_MEMBERS, group_size=_MEMBERS
    )
    tables = make_plan(program).tables
    gpus = np.exp(gpu * rng.standard_normal((_MEMBERS, samples)) - gpu**2 / 2)

    def draw(mean, spread, *shape):
        return mean * np.exp(spread * rng.standard_normal((*shape, samples)) - spread**2 / 2)

    def compute(*means):
        return np.max(sum(gpus * draw(mean, sigma, _MEMBERS) for mean in means), axis=0)

    def column(seconds, *means):
        return side_by_side(compute(*means), draw(seconds, 3 * sigma), contention)

    total = compute(backward[0, 0], forward[1, 4])
    for i in range(2):
        f, b = forward[i], backward[i]
        total += column(b[1], *([f[0]] if i == 0 else [forward[0, 4], f[0]]))
        total += column(f[1], b[2])
        total += column(b[3], f[2])
        total += column(f[3], *([b[4], backward[1, 0]] if i == 0 else [b[4]]))
    slowest = gpus.max(axis=0)
    mean, std, shared = (
        np.interp(slowest, np.asarray(tables.nodes), np.asarray(values))
        for values in (*tables.moments[:2, 0, 0], tables.shared[0, 0])
    )
    assert abs(np.mean(mean - total)) < 5e-4 * np.mean(total)
    whole = np.sqrt(np.var(mean) + np.mean(std**2 + shared**2))
    assert whole == pytest.approx(np.std(total), rel=0.03)
    assert jnp.all(jnp.isfinite(tables.moments))


def test_tensor_parallel_groups_wait_for_one_another_at_exchanges():
    """Two groups of two ranks each: of each, the slowest sum up to an exchange counts."""
    rng, samples, sigma = np.random.default_rng(0), 40_000, 0.05
    inner = Segment(((_gemm("inner", 1e-3), 1),), Kernel("all_gather", "tp", 1e-5))
    forward, backward = (((inner, *_layer(name, [1e-3] * 5)), 1) for name in "FB")
    passes = Passes((((forward,), 0.0),), (((backward,), 0.0),), (0.0, 0.0))
    block = _paired(passes)
    variability = Variability(residual={"gemm": lognormal(sigma)})
    sizes: Any = {"members": _MEMBERS // 2, "group_size": _MEMBERS}
    program = assemble(graph_of([()]), [block], variability=variability, **sizes)

    def draw():
        return 1e-3 * np.exp(sigma * rng.standard_normal((_MEMBERS, samples)) - sigma**2 / 2)

    def until_exchange(before: Any = 0.0):
        pairs = (before + draw()).reshape(2, 2, samples).max(axis=1)
        return (np.repeat(pairs, 2, axis=0) + 1e-5 + draw()).max(axis=0)

    total = until_exchange(draw()) + np.maximum(until_exchange(), 1e-3)
    total += sum(np.maximum(draw().max(axis=0), 1e-3) for _ in range(3))
    (moments,) = make_plan(program).tables.moments[:2, 0, 0].T[:1]
    assert moments[0] == pytest.approx(total.mean(), rel=5e-4)
    assert moments[1] == pytest.approx(total.std(), rel=0.02)


_EXPERTS = ("model=qwen3-30b-a3b", "layout.tp=1", "layout.ep=8", "schedule.num_microbatches=16")
_EXPERTS += ("schedule.kind=dual-pipe-v", "schedule.virtual_stages=2", "training.dtype=bf16")
_EXPERTS += ("layout.pp=4", "layout.dp=192")
_TWO_WAYS = ("schedule.kind=dual-pipe", "schedule.virtual_stages=1")


def test_pairs_of_a_job_run_all_of_both():
    job = load_job("gpt3-175b-h100-768", _EXPERTS)
    workload: Any = lower_job(job)
    for stages in ((0, 1), (3, 3), (7, 0)):
        block = _paired(workload.passes, *stages)
        serial = workload.forward[stages[0]] + workload.backward[stages[1]]
        assert kernels_of(block) == kernels_of(serial)
        exchanges = sum(
            kernel.mean * count
            for kernel, count in kernels_of(serial).items()
            if kernel.kind == "all_to_all"
        )
        both = block_mean(serial)
        assert max(both - exchanges, exchanges) < block_mean(block) < both


def test_host_launches_of_both_directions_are_equal():
    workload = lower_job(load_job("gpt3-175b-h100-768", (*_EXPERTS, *_TWO_WAYS)))
    for stages in (workload.passes.forward, workload.passes.backward):
        launches = [seconds for _, seconds in stages]
        assert len(launches) == len(workload.forward)
        assert launches[: len(launches) // 2] == launches[len(launches) // 2 :]


def test_only_overlapped_pairs_with_experts_change():
    dense = load_job(
        "gpt3-175b-h100-768", ("schedule.kind=dual-pipe-v", "schedule.virtual_stages=2")
    )
    assert lower_job(dense).passes is None
    overlapped, apart = (
        predict(load_job("gpt3-175b-h100-768", (*_EXPERTS, *more)))
        for more in ((), ("training.zero=2",))
    )
    # Of a pair that is not cut into columns all exchanges are exposed.
    assert overlapped.breakdown["exposed ep"] < 0.6 * apart.breakdown["exposed ep"]


@pytest.mark.parametrize(("pp", "virtual_stages"), [(4, 2), (1, 1)])
def test_exchanges_of_one_f_one_b_are_hidden_where_its_ops_are_paired(pp, virtual_stages):
    """Of interleaved ranks and of a rank alone; nothing else than exchanges is faster."""
    layout = (f"layout.pp={pp}", f"schedule.virtual_stages={virtual_stages}", "layout.dp=64")
    kinds = ("overlapped-1f1b", "interleaved-1f1b")
    paired, alone = (
        predict(load_job("gpt3-175b-h100-768", (*_EXPERTS, *layout, f"schedule.kind={kind}")))
        for kind in kinds
    )
    assert paired.breakdown["exposed ep"] < 0.6 * alone.breakdown["exposed ep"]
    assert paired.breakdown["gemm"] == pytest.approx(alone.breakdown["gemm"])
