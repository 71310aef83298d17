"""Graphs of which many ops run side by side: one op waits for all of them, or nothing does."""

from itertools import product

import jax
import numpy as np
import pytest

import prism_jax as prism
from prism_jax.latency import Gamma, LogNormal
from prism_jax.maxplus import critical_ops, edges_of, latest_ends, op_ends, to_levels
from prism_jax.program import Program

from .helpers import event_loop_ends
from .test_maxplus import ends_and_criticality


def _wide(number: int) -> list[tuple[int, ...]]:
    """One op, many that wait for it, two that wait for all of these, and one for every other op."""
    middle = tuple(range(1, number + 1))
    return [(), *[(0,)] * number, middle, middle, tuple(range(number + 3))[::-1]]


def _numbers_held(whole) -> int:
    """How many numbers the arrays of a program hold, static ones too."""
    if isinstance(whole, Program):
        parts = [whole.levels, whole.ops, whole.rows, whole.blocks, whole.sinks, whole.latencies]
        return sum(map(_numbers_held, parts))
    fields = vars(whole).values() if hasattr(whole, "__dataclass_fields__") else ()
    return np.size(getattr(whole, "value", 0)) + sum(map(_numbers_held, fields))


_ALIKE = LogNormal(1.0, 0.2)
_SHAPES = {
    "one waits for all": lambda n: [*(prism.Op(_ALIKE) for _ in range(n)), prism.Op(1.0, range(n))],
    "nothing waits": lambda n: [prism.Op(_ALIKE) for _ in range(n)],
    "each on a rank of its own": lambda n: [prism.Op(_ALIKE, rank=i) for i in range(n)],
    "all wait for one": lambda n: [prism.Op(_ALIKE, [0] * (i > 0)) for i in range(n)],
    "a law each": lambda n: [prism.Op(LogNormal(1.0, 0.1 + 0.01 * i)) for i in range(n)],
}


@pytest.mark.parametrize("shape", _SHAPES)
def test_a_program_grows_with_its_ops_and_edges_and_not_with_their_square(shape):
    few, many = (prism.compile_graph(_SHAPES[shape](number)) for number in (50, 200))
    assert _numbers_held(many) < 5 * _numbers_held(few)
    # What a lane and a sink read is compiled one after the other; of slots, samples have each.
    levels = many.levels
    assert levels.reads.shape[2] <= 4
    assert levels.sinks.shape[1] <= 16
    assert levels.num_slots < 100


def test_sets_of_ops_that_many_wait_for_are_joined_once():
    """Two layers side by side, every op of the second waiting for every one of the first: their
    edges are the square of the ops, and memory grows with the ops, for these have edges alike.
    """
    number = 60
    levels = to_levels([()] * number + [tuple(range(number))] * number, [(2 * number - 1,)])
    assert levels.num_joins < number
    assert levels.reads.size < 8 * 2 * number
    op, before = edges_of(levels)
    assert {*zip(op, before, strict=True)} == {*product(range(number, 2 * number), range(number))}


def test_wide_joins_are_those_of_an_event_loop_with_the_first_of_equal_ends():
    """Integers and ties make Euler's identity and the path exact: it is as long as the end."""
    predecessors = _wide(30)
    number = len(predecessors)
    every = tuple(range(number))
    sinks = [(number - 1,), every, every[::-1]]
    latencies = np.random.default_rng(0).integers(1, 4, (number, 5)).astype(float)
    levels = to_levels(predecessors, sinks)
    found, criticality = ends_and_criticality(levels, latencies, np.array([1.0, 0, 0]))
    ends = op_ends(levels, latencies)
    for sample in range(5):
        expected = np.array(event_loop_ends(predecessors, list(latencies[:, sample])))
        assert np.array_equal(ends[:number, sample], expected)
        assert np.all(found[:, sample] == expected[-1])
    path = critical_ops(levels, ends, np.zeros(5, int))
    assert np.array_equal(criticality, path)
    assert np.array_equal((latencies * path).sum(axis=0), found[0])
    # The last op waits for the one before it first, which ends no earlier than any other.
    tied = ends[number - 3] == ends[number - 2]
    assert tied.any()
    assert np.all(path[number - 2, tied] & ~path[number - 3, tied])
    op, before = edges_of(levels)
    assert [{*before[op == i]} for i in range(number)] == [{*each} for each in predecessors]


def test_slack_through_wide_joins():
    """An op that takes its slack longer makes the step no longer, one that takes more does."""
    predecessors = _wide(20)
    number = len(predecessors)
    levels = to_levels(predecessors, [range(number)])
    latencies = np.random.default_rng(1).gamma(2.0, 1.0, (number, 2))
    ends = op_ends(levels, latencies)
    slack = latest_ends(levels, latencies, ends.max(axis=0)[None]) - ends[:number]
    for extra in (0.0, 0.1):
        longer = np.eye(number)[:, :, None] * (slack + extra)
        changed = np.moveaxis(latencies + longer, 0, 1).reshape(number, -1)
        new = op_ends(levels, changed).max(axis=0).reshape(-1, 2)
        np.testing.assert_allclose(new, ends.max(axis=0) + extra + 0 * new, atol=1e-9)


def _ranks():
    """Ranks of one op each, of which number 13 takes longest."""
    ops = [prism.Op(1.0 + (rank == 13), rank=rank) for rank in range(40)]
    return ops, prism.compile_graph(ops, num_replicas=3)


def test_ranks_without_reductions_have_one_sink():
    ops, program = _ranks()
    levels = program.levels
    assert (program.sinks.number, program.num_ranks) == (1, 40)
    ends = op_ends(levels, np.array([[op.latency] for op in ops]))
    assert ends[levels.sink_ops].max(axis=1).tolist() == [[2.0]]


@pytest.mark.slow
def test_of_ranks_with_one_sink_the_last_ends_the_step():
    ops, program = _ranks()
    step = prism.sample_step(program, num_samples=64, key=jax.random.key(0))
    assert (step.step_s, step.barrier_s, step.last_rank, step.path.tolist()) == (2.0, 2.0, 13, [13])
    assert step.reduction_s.tolist() == [[op.latency] * 2 for op in ops]


def test_equal_laws_are_of_one_kind_whichever_objects_they_are():
    laws = [LogNormal(1.0, 0.2), LogNormal(1.0, 0.2), LogNormal(1.0, 0.3), Gamma(1.0, 0.2)]
    program = prism.compile_graph([prism.Op(law) for law in laws])
    kinds = [program.latencies.kinds[kind] for kind in program.latencies.kind]
    rows = program.blocks.direct[program.rows.class_[program.ops.row]]
    assert [kinds[row] for row in rows] == ["law 0", "law 0", "law 1", "law 2"]
    for mean, law in zip(np.asarray(program.latencies.mean)[rows], laws, strict=True):
        assert mean == law.mean()
