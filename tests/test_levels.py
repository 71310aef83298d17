"""How graphs are cut into levels, and what a program keeps of its ops."""

import itertools as it
from collections import defaultdict
from typing import Any

import equinox as eqx
import jax
import numpy as np
import pytest
from jaxtyping import Float, Int, Real

import prism_jax as prism
from prism_jax._padding import AnyArray, array_fields, pad, without_axes
from prism_jax.maxplus import to_levels
from prism_jax.op_law import parameters_of
from prism_jax.program import Overlaps, Variability
from prism_jax.program._assemble import assemble
from prism_jax.replica._plan import structure_of
from prism_jax.schedule import GPipe, InterleavedOneFOneB, LoopedBFS, OneFOneB, op_graph

from .helpers import graph_of, one_kernel, random_dag, rich_program


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("width", [None, 1, 3])
def test_slots_hold_all_live_values_with_the_fewest_slots(seed, width):
    predecessors = [*random_dag(seed, num_ops=80), (7, 7)]
    sinks = [(5, 11), (), (80, 5)]
    levels = to_levels(predecessors, sinks, width)
    names = ("nodes", "predecessors", "reads", "writes", "sinks", "sink_ops")
    ops, before, reads, writes, sink_slots, sink_ops = (getattr(levels, name) for name in names)
    assert sorted(ops[ops >= 0]) == list(range(81))
    level = {int(op): l for l, row in enumerate(ops) for op in row if op >= 0}
    last_read: dict[int, int] = {}
    for op, l in sorted(level.items(), key=lambda item: item[1]):
        last_read |= dict.fromkeys(predecessors[op], l)
    last_read |= {op: len(ops) for sink in sinks for op in sink}
    # Slot 0 holds the start, for which -1 stands here as in `predecessors`; padding writes to 1.
    held = {0: -1}
    most = 0
    for l in range(len(ops)):
        for lane, op in enumerate(ops[l]):
            waits = list(predecessors[op]) if op >= 0 else []
            assert before[l, lane].tolist() == waits + [-1] * (before.shape[2] - len(waits))
            assert [held[slot] for slot in reads[l, lane]] == before[l, lane].tolist()
        kept = writes[l][writes[l] > 1]
        assert len(set(kept)) == len(kept)
        held |= {int(slot): int(op) for slot, op in zip(writes[l], ops[l], strict=True)}
        most = max(most, sum(level[op] <= l < last for op, last in last_read.items()))
    assert levels.num_slots == 2 + most
    for slots, members in zip(sink_slots, sink_ops, strict=True):
        assert [held[slot] for slot in slots] == members.tolist()


@pytest.mark.parametrize(
    ("schedule", "padding"),
    [
        (OneFOneB(8, 32), 0.02),
        (InterleavedOneFOneB(4, 16, 2), 0.03),
        (InterleavedOneFOneB(8, 16, 12), 0.01),
        (InterleavedOneFOneB(16, 32, 8), 0.02),
        (GPipe(8, 64), 0.06),
        (LoopedBFS(8, 32, 2), 0.06),
    ],
    ids=repr,
)
def test_levels_are_as_wide_as_a_power_of_two_and_nearly_full(schedule, padding):
    graph = op_graph(schedule)
    ops = to_levels(graph.predecessors, graph.last).ops
    assert ops.shape[1] in (2, 4, 8, 16, 32, 64)
    assert ops.size * (1 - padding) < graph.num_ops


def test_no_op_makes_no_level():
    levels = to_levels([], [()])
    assert levels.ops.shape == (0, 2)
    assert levels.sinks.tolist() == [[0]]


def test_equal_blocks_are_one_class_whichever_objects_they_are():
    graph = op_graph(OneFOneB(3, 4))
    blocks = [
        one_kernel("send_recv", 0.1, "network") if phase == "SR" else one_kernel("gemm", 1.0)
        for phase in graph.phase
    ]
    shared = {block: block for block in blocks}
    program = assemble(graph, blocks)
    assert program == assemble(graph, [shared[block] for block in blocks])
    assert len(program.blocks.direct) == 2
    rows = list(zip(program.rows.class_, program.rows.rank, strict=True))
    assert len(set(rows)) == len(rows) == 4
    for op, row in enumerate(program.ops.row):
        send = graph.phase[op] == "SR"
        assert rows[row] == (blocks[op] != blocks[0], -1 if send else graph.rank[op])


def test_a_tail_may_be_the_block_of_an_op():
    graph = graph_of([(), (0,)])
    blocks = [one_kernel("gemm", 1.0), one_kernel("gemm", 2.0)]
    program = assemble(graph, blocks, tail=blocks[0])
    assert (
        prism.simulate(program, num_samples=1_024, key=jax.random.key(0), sampling="plain").mean
        == 4.0
    )


def test_blocks_are_as_many_as_ops():
    with pytest.raises(ValueError, match="1 blocks were given for the ops; give one for each of"):
        assemble(graph_of([(), (0,)]), [one_kernel("gemm", 1.0)])


def test_a_module_is_padded_by_the_names_of_its_axes():
    class Toy(eqx.Module):
        counts: Real[AnyArray, "rows columns"]
        places: Int[AnyArray, " rows"] = eqx.field(metadata={"fill": -1})
        share: float | Float[AnyArray, ""]
        inner: "Toy | None" = None

    class Anonymous(eqx.Module):
        counts: Int[AnyArray, "..."]

    toy = Toy(np.array([[1, 2]]), np.array([5]), 0.5, Toy(np.ones((2, 2), int), np.arange(2), 1.0))
    padded: Any = pad(toy, {"rows": 3}, np.float32)
    assert padded.counts.tolist() == [[1, 2], [0, 0], [0, 0]]
    assert padded.places.tolist() == [5, -1, -1]
    assert (padded.counts.dtype, padded.places.dtype) == (np.float32, np.int32)
    assert float(padded.share) == 0.5
    assert padded.inner.places.tolist() == [0, 1, -1]
    left = without_axes(toy, "columns")
    assert left.counts is None
    assert left.inner.places is toy.inner.places  # pyright: ignore[reportOptionalMemberAccess]
    assert without_axes(toy, "rows", "columns").counts is None
    with pytest.raises(TypeError, match=r"`Anonymous.counts` has axes without names"):
        pad(Anonymous(np.ones(2, int)), {}, np.float32)


def _axes(module, owner=""):
    """The names of the axes of a module's arrays, and their lengths."""
    for name, axes, *_ in array_fields(type(module)):
        value = getattr(module, name)
        if isinstance(value, Variability):
            continue  # Laws have any axes.
        if isinstance(value, eqx.Module):
            yield from _axes(value, name if isinstance(value, Overlaps) else "")
        elif axes is not None and value is not None:
            for axis, length in zip(axes, np.shape(value), strict=True):
                # The first axes of branches are of their own.
                yield f"{owner} {axis}" if axis in ("branches", "inner") else axis, length


@pytest.mark.parametrize("what", ["everything", "experts"])
def test_an_axis_has_one_length_wherever_its_name_stands(what):
    """Both in a program and, with padding, in a plan."""
    if what == "everything":
        program = prism.slow_rank(rich_program(2), 1, 1.2).program
    else:
        uneven = ["model.modules.moe.load_concentration=500", "schedule.num_microbatches=16"]
        program = prism.compile_job(prism.load_job("qwen3-235b-h100-256", uneven))
    _, latencies, adjustment, _ = parameters_of(program)
    for modules in ([program], filter(None, (structure_of(program), latencies, adjustment))):
        lengths = defaultdict(set)
        for axis, length in it.chain.from_iterable(map(_axes, modules)):
            lengths[axis].add(length)
        assert {axis: many for axis, many in lengths.items() if len(many) > 1} == {}
        assert {"ops", "rows", "sinks", "kernels", "classes", "segments"} <= lengths.keys()
