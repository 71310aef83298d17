"""Reductions of gradients by virtual stage and by bucket, beside the backward."""

import itertools as it
from typing import Any

import equinox as eqx
import jax
import msgspec
import numpy as np
import pytest

import prism_jax as prism
from prism_jax.analysis import exposed_data_parallel
from prism_jax.data import load_job
from prism_jax.latency import AbstractLatency
from prism_jax.lowering import Sink, cut_at_sinks, frame_of, sinks_of, when_reduced
from prism_jax.prediction._predict import run
from prism_jax.program._assemble import assemble
from prism_jax.schedule import InterleavedOneFOneB, OneFOneB, op_graph
from prism_jax.workload import block_mean

from .helpers import graph_of, lognormal, lower_job, one_kernel


_KEY = jax.random.key(0)
_CONTENTION = 0.15
_REPLICAS = 8
_SINKS = ((0, 2), (0, 4), (0, 6), (1, 3), (1, 7))  # Rank and op.
_SECONDS = (0.9, 0.6, 0.5, 1.6, 0.7)
# Two ranks of four ops each, which also wait for each other.
_BEFORE = ((), (), (0,), (1, 0), (2, 3), (3,), (4,), (5, 4))
_RANK = [0, 1] * 4


def _program(
    spread=(0.2, 0.3), *, seconds=_SECONDS, contention=_CONTENTION, num_replicas=_REPLICAS
):
    sinks = [
        Sink(rank, (op,), one_kernel("reduce_scatter", mean, "network"))
        for (rank, op), mean in zip(_SINKS, seconds, strict=True)
    ]
    residual: dict[str, AbstractLatency] = {
        "gemm": lognormal(spread[0]),
        "reduce_scatter": lognormal(spread[1]),
    }
    return assemble(
        graph_of(_BEFORE, rank=_RANK),
        [one_kernel("gemm", 1.0)] * 8,
        variability=prism.Variability(residual=residual if any(spread) else {}),
        sinks=sinks,
        contention=contention,
        num_replicas=num_replicas,
    )


def _op_ends(latencies):
    ends = []
    for before, latency in zip(_BEFORE, latencies, strict=True):
        ends.append(np.max([ends[op] for op in before], axis=0, initial=0) + latency)
    return ends


def _steps(latencies, reductions, contention=_CONTENTION):
    """Every replica by itself, then the reductions of each rank one after the other."""
    ends = _op_ends(latencies)
    ready = np.zeros(1)
    for rank in (0, 1):
        mine = [i for i, (r, _) in enumerate(_SINKS) if r == rank]
        for i in mine:
            start = np.max(ends[_SINKS[i][1]], axis=0)  # Over replicas.
            slowed = contention * sum(reductions[j] for j in mine if j < i)
            ready = np.maximum(ready, start + slowed + sum(reductions[j] for j in mine if j >= i))
    return ready


def _simulated(number, seed=0):
    rng = np.random.default_rng(seed)

    def drawn(sigma, *shape):
        return np.exp(sigma * rng.standard_normal(shape) - sigma**2 / 2)

    reductions = [mean * drawn(0.3, number) for mean in _SECONDS]
    return _steps(drawn(0.2, 8, _REPLICAS, number), reductions)


def test_the_law_is_that_of_all_replicas_and_sinks():
    """Sinks tie here, which one replica for all of them does not do justice to."""
    truth = _simulated(200_000)
    law = prism.simulate(_program(), num_samples=2**15, key=_KEY)
    error = np.hypot(truth.std() / np.sqrt(len(truth)), law.errors.mean)
    assert law.mean == pytest.approx(truth.mean(), abs=4 * error)
    assert law.std == pytest.approx(truth.std(), rel=0.025)


@pytest.mark.parametrize("contention", [0.0, _CONTENTION])
@pytest.mark.parametrize("seconds", [_SECONDS, (4.0, 0.1, 0.1, 0.1, 0.1), (0.1,) * 5, (0.0,) * 5])
def test_without_variance_steps_are_exact(seconds, contention):
    truth = float(_steps(np.ones((8, 1, 1)), seconds, contention)[0])
    program = _program((0, 0), seconds=seconds, contention=contention)
    law = prism.simulate(program, num_samples=64, key=_KEY, sampling="plain")
    assert law.mean == pytest.approx(truth, rel=1e-6)
    assert law.std == pytest.approx(0, abs=1e-5)
    sinks = [
        Sink(rank, (op,), one_kernel("reduce_scatter", mean, "network"))
        for (rank, op), mean in zip(_SINKS, seconds, strict=True)
    ]
    ends = np.array(_op_ends(np.ones(8)))
    assert when_reduced(sinks, ends[[op for _, op in _SINKS]], contention).max() == pytest.approx(
        truth, rel=1e-12
    )


@pytest.mark.slow
def test_derivatives_by_reductions_agree_with_differences():
    program = _program(num_replicas=1)

    def mean(program):
        return prism.estimate(program, prism.Mean(), num_samples=2**13, key=_KEY)

    gradient = eqx.filter_grad(mean)(program).latencies.mean
    means = program.latencies.mean
    assert len(means) == 6  # Of one op, and of each reduction.
    for kernel in range(6):

        def at(change, kernel=kernel):
            changed = means.at[kernel].add(change)
            return mean(eqx.tree_at(lambda p: p.latencies.mean, program, changed))

        difference = float(at(2e-3) - at(-2e-3)) / 4e-3
        assert float(gradient[kernel]) == pytest.approx(difference, rel=0.01, abs=0.003)


@pytest.mark.slow
def test_the_mean_step_is_homogeneous_in_the_mean_latencies():
    """Steps grow with all means in proportion, also with replicas of which one decides."""
    program = _program()

    def mean(program):
        return prism.estimate(program, prism.Mean(), num_samples=2**13, key=_KEY)

    value, gradient = eqx.filter_value_and_grad(mean)(program)
    owed = np.asarray(gradient.latencies.mean * program.latencies.mean, np.float64)
    assert owed.sum() == pytest.approx(float(value), rel=1e-4)
    assert (owed > 0).all()


_JOB = "megatron-22b-a100-8"
_LAYOUT = ["layout.tp=2", "layout.pp=2", "layout.dp=2", "training.zero=1"]
_LAYOUT += [
    "model.num_layers=8",
    "schedule.num_microbatches=4",
    "training.overlap_grad_reduce=true",
]


_SUMMED = ('schedule.kind="interleaved-1f1b"', "schedule.virtual_stages=2", "training.zero=2")
_SUMMED += ("training.accumulate_gradients=true", "model.tied_embeddings=false")
_SUMMED += ("cluster.links.nvlink.bandwidth_bytes_per_s=1e10",)


def _job(*changes):
    return load_job(_JOB, [*_LAYOUT, *changes])


def _without_variance(job):
    kernels = msgspec.structs.replace(job.kernels, variability=())
    return msgspec.structs.replace(job, kernels=kernels)


def test_one_bucket_of_one_stage_is_no_overlap():
    whole = prism.compile_job(_job(f"training.gradient_bucket_size={10**9}", "model.num_layers=2"))
    assert whole == prism.compile_job(
        _job("training.overlap_grad_reduce=false", "model.num_layers=2")
    )
    assert whole.sinks.rank.tolist() == [0, 1]


def test_a_prediction_is_the_simulation_without_variance():
    """`test_drawn_jobs.py` has other schedules, without the engine."""
    job = _without_variance(_job("schedule.blocking=true"))
    law = prism.simulate(prism.compile_job(job), num_samples=64, key=_KEY)
    assert law.mean == pytest.approx(prism.predict(job).mean, rel=1e-6)


def test_the_buckets_of_very_many_layers_are_few_and_change_nothing(monkeypatch):
    """Each is an op, of which a program should have no more than it needs."""
    small = ("training.gradient_bucket_size=1", "model.num_layers=600", "layout.pp=1")
    job = _job(*small, "layout.tp=1", "layout.dp=8")
    few, predicted = lower_job(job).reductions[0], prism.predict(job).mean
    monkeypatch.setattr("prism_jax.workload._data_parallel._MOST_BUCKETS", 10**6)
    each = lower_job(job).reductions[0]
    assert len(few) <= 512 < len(each)
    seconds = [sum(block_mean(bucket.piece or ()) for bucket in buckets) for buckets in (few, each)]
    assert seconds[0] == pytest.approx(seconds[1])
    assert predicted == pytest.approx(prism.predict(job).mean, rel=1e-3)


def test_of_many_small_buckets_the_last_is_exposed():
    """And what the others slow the backward by."""
    job: Any = _job("training.gradient_bucket_size=1", "layout.tp=1", "layout.pp=1", "layout.dp=8")
    work = lower_job(job)
    graph = op_graph(OneFOneB(1, 4))
    sinks = sinks_of(graph, work)
    assert len(sinks) == job.model.num_layers + 2  # The head's norm, and the embedding.
    ends = np.cumsum(
        [block_mean(work.forward[0] if p == "F" else work.backward[0]) for p in graph.phase]
    )
    at_end = np.full(len(sinks), ends[-1])
    exposed = when_reduced(sinks, at_end, work.contention) - ends[-1]
    # The backward of the embedding takes so little that the first layer's reduction outlasts it.
    *others, layer, last = (block_mean(sink.reduction) for sink in sinks)
    late = layer + last - block_mean(sinks[-1].pieces[-1])
    assert exposed == pytest.approx(late + work.contention * sum(others), rel=1e-9)
    assert exposed < 0.5 * (last + layer + sum(others))


def test_pieces_of_a_backward_are_all_of_it():
    work = lower_job(_job("training.gradient_bucket_size=1"))
    graph = op_graph(OneFOneB(2, 4))
    blocks = [work.forward[s] if p == "F" else work.backward[s] for p, s in _labels(graph)]
    sinks = sinks_of(graph, work)
    cut, pieces, moved = cut_at_sinks(graph, blocks, sinks)
    assert cut.num_ops == graph.num_ops + len(sinks) - 2
    assert sum(map(block_mean, pieces)) == pytest.approx(sum(map(block_mean, blocks)), rel=1e-12)
    assert all(max(before, default=-1) < op for op, before in enumerate(cut.predecessors))
    assert sorted(it.chain(*cut.orders)) == np.flatnonzero(~cut.is_send_recv).tolist()
    assert moved[-1].ops == cut.last[1]
    assert [s.ops[0] for s in moved[:-1]] == list(cut.orders[0][-len(sinks) + 1 :])
    assert all(block_mean(sink.reduction) > 0 for sink in moved)


def _labels(graph):
    # A send_recv has the label of some stage; what it takes does not matter here.
    return zip(graph.phase, graph.stage, strict=True)


def test_stages_of_a_rank_reduce_when_their_last_microbatch_has_come_back():
    job = _job('schedule.kind="interleaved-1f1b"', "schedule.virtual_stages=2")
    program = prism.compile_job(job)
    ops, levels = program.ops, program.levels
    of_sinks = [levels.sink_ops[i] for i in range(program.sinks.number)]
    for rank, at in zip(program.sinks.rank, of_sinks, strict=True):
        (op, *_) = (op for op in at if op >= 0)
        assert ops.rank[op] == rank
        assert (ops.phase[op], ops.microbatch[op]) == ("B", 3)
    stages = [int(ops.stage[at[at >= 0][0]]) for at in of_sinks]
    assert list(dict.fromkeys(stages)) == [2, 0, 3, 1]


def test_gradients_summed_over_all_microbatches_are_dealt_once():
    """As where replicas share the optimizer only: they meet as often, and as late."""
    once = (*_SUMMED, "schedule.num_microbatches=2")
    assert prism.compile_job(_job(*once)) == prism.compile_job(_job(*once, "training.zero=1"))
    each = prism.predict(_job(*once, "training.accumulate_gradients=false"))
    assert prism.predict(_job(*once)).mean < each.mean


@pytest.mark.parametrize("microbatches", [4, 6, 8])
def test_a_stage_deals_its_gradients_whenever_its_rank_turns_to_another(microbatches):
    one_bucket = f"training.gradient_bucket_size={10**9}"
    job = _job(*_SUMMED, one_bucket, f"schedule.num_microbatches={microbatches}")
    work = msgspec.structs.replace(lower_job(job), contention=0.0)
    graph = op_graph(InterleavedOneFOneB(2, microbatches, 2))
    ends: list[float] = []
    for op, before in enumerate(graph.predecessors):
        if graph.is_send_recv[op]:
            latency = work.send_recv[int(graph.rank[op]), int(graph.peer[op])].mean
        else:
            blocks = work.forward if graph.phase[op] == "F" else work.backward
            latency = block_mean(blocks[int(graph.stage[op])])
        ends.append(max((ends[i] for i in before), default=0.0) + latency)
    late = 0.0
    for rank, order in enumerate(graph.orders):
        whole = {one.stages: block_mean(one.kernels) for one in work.reductions[rank]}
        backwards = [op for op in order if graph.phase[op] == "B"]
        clock, turns = 0.0, 0
        for op, after in zip(backwards, [*backwards[1:], None], strict=True):
            if after is None or graph.stage[after] != graph.stage[op]:
                clock = max(clock, ends[op]) + whole[(int(graph.stage[op]),)]
                turns += 1
        assert turns == 2 * microbatches / 2
        late = max(late, clock)
    assert run(frame_of(graph), work).seconds == pytest.approx(late + block_mean(work.tail))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (("training.overlap_grad_reduce=false",), "leave `training.overlap_grad_reduce` true"),
        (('schedule.kind="dual-pipe"', "schedule.virtual_stages=1"), "two copies of the model"),
    ],
)
def test_gradients_that_cannot_be_summed_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        prism.predict(_job(*_SUMMED, *changes))


def test_sinks_that_do_not_fit_are_refused():
    graph = graph_of(_BEFORE, rank=_RANK)
    with pytest.raises(ValueError, match=r"sinks are of the ranks \[1, 0\]"):
        assemble(graph, [one_kernel("gemm", 1.0)] * 8, sinks=[Sink(1, (7,)), Sink(0, (3,))])


def test_a_single_reduction_is_fully_exposed(monkeypatch):
    """Whichever replica is the slowest; and no pilot is drawn for it."""

    def refuse(*run, **options):
        raise AssertionError("A pilot was drawn.")

    monkeypatch.setattr("prism_jax.engine._pilot.importance_gain", refuse)
    program = assemble(
        graph_of([()]),
        [one_kernel("gemm", 1.0)],
        variability=prism.Variability(
            residual={"gemm": lognormal(0.1), "reduce_scatter": lognormal(0.3)}
        ),
        sinks=[Sink(0, (0,), one_kernel("reduce_scatter", 0.5, "network"))],
        num_replicas=64,
    )
    found = exposed_data_parallel(program, num_samples=4096, key=_KEY)
    spread = 0.5 * np.sqrt(np.expm1(0.3**2))
    assert np.mean(found) == pytest.approx(0.5, abs=4 * spread / np.sqrt(len(found)))
    assert np.std(found) == pytest.approx(spread, rel=0.1)
