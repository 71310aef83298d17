import copy
import dataclasses
import inspect
import re
from typing import Any

import numpy as np
import pytest

import prism_jax.schedule as ps


all_schedules = [
    ps.GPipe(3, 4),
    ps.OneFOneB(4, 6),
    ps.OneFOneB(4, 2),
    ps.InterleavedOneFOneB(4, 8, 2),
    ps.InterleavedOneFOneB(2, 6, 3, microbatch_group_size=3),
    ps.OverlappedOneFOneB(4, 8, 2),
    ps.OverlappedOneFOneB(1, 3, 1),
    ps.LoopedBFS(2, 4, 2),
    ps.ZBH1(4, 6),
    ps.ZBH1(4, 2),
    ps.ZBH2(3, 7),
    ps.InterleavedZeroBubble(4, 8, 2),
    ps.ZBV(3, 6),
    ps.ZBV(3, 2),
    ps.DualPipe(4, 8),
    ps.DualPipeV(3, 7),
    ps.VHalf(3, 7),
    ps.VMin(4, 8),
    ps.ZBGreedy(3, 5, memory_limit=2),
    ps.ZBGreedy(2, 5, 2, backward_input=(1.0, 2.0, 1.0, 2.0)),
    ps.Hanayo(2, 5, 4),
    ps.Chimera(4, 6),
    ps.CustomSchedule(
        [["0F0", "0F1", "0I0", "0W0", "0B1"], ["1F0", "1I0", "1W0", "1F1", "1B1"]],
        stage_to_rank=[0, 1],
    ),
]

# DualPipe on two ranks, with two microbatches in each direction.
dual_pipe = [
    ["0F0", "3F0", "0F1", "3B0", "(3F1;0B0)OVERLAP_F_B", "3B1", "0I1", "0W1"],
    ["2F0", "1F0", "2F1", "1B0", "(1F1;2B0)OVERLAP_F_B", "1B1", "2I1", "2W1"],
]


def test_orders_by_hand():
    assert ps.GPipe(2, 2).orders() == [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1F1", "1B0", "1B1"]]
    assert ps.OneFOneB(2, 3).orders() == [
        ["0F0", "0F1", "0B0", "0F2", "0B1", "0B2"],
        ["1F0", "1B0", "1F1", "1B1", "1F2", "1B2"],
    ]
    assert ps.LoopedBFS(2, 2, 2).orders()[1] == [
        "1F0",
        "1F1",
        "3F0",
        "3F1",
        "3B1",
        "3B0",
        "1B1",
        "1B0",
    ]
    assert ps.InterleavedOneFOneB(1, 2, 2, microbatch_group_size=2).orders() == [
        ["0F0", "0F1", "1F0", "1B0", "1F1", "1B1", "0B0", "0B1"]
    ]


@pytest.mark.parametrize("schedule", all_schedules, ids=repr)
def test_schedule_is_a_value(schedule):
    twin = copy.deepcopy(schedule)
    assert twin == schedule
    assert hash(twin) == hash(schedule)
    with pytest.raises(dataclasses.FrozenInstanceError):
        schedule.num_ranks = 3
    orders = schedule.orders()
    orders[0].clear()
    assert schedule.orders()[0] != []


@pytest.mark.parametrize("schedule", all_schedules, ids=repr)
def test_orders_round_trip(schedule):
    custom = ps.CustomSchedule(schedule.orders(), schedule.stage_to_rank)
    assert custom.orders() == schedule.orders()
    assert custom == ps.CustomSchedule(schedule.orders(), list(schedule.stage_to_rank))
    for name in ("stage_to_rank", "num_ranks", "num_stages", "chain_starts"):
        assert getattr(custom, name) == getattr(schedule, name)
    # Each of several chains numbers its microbatches from zero.
    each = schedule.num_microbatches / len(schedule.chain_starts)
    assert custom.num_microbatches == each
    costs: dict[str, Any] = {
        "forward": 2,
        "backward_input": 3,
        "backward_weight": 1,
        "send_recv": 1,
    }
    assert ps.evaluate(custom, **costs).makespan == ps.evaluate(schedule, **costs).makespan


@pytest.mark.parametrize("schedule", all_schedules, ids=repr)
def test_files_round_trip(schedule, tmp_path):
    path = tmp_path / "schedule.csv"
    ps.save_schedule(schedule, path)
    read = ps.load_schedule(path)
    assert read == ps.CustomSchedule(schedule.orders(), schedule.stage_to_rank)
    assert read.chain_starts == schedule.chain_starts


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize("schedule", [*all_schedules, ps.CustomSchedule(dual_pipe, [0, 1, 1, 0])])
def test_graph(schedule, blocking):
    if blocking and not isinstance(schedule, ps.GPipe | ps.OneFOneB):
        with pytest.raises(ValueError, match="Blocking send_recv is only for schedules with one"):
            ps.op_graph(schedule, blocking=True)
        return
    graph = ps.op_graph(schedule, blocking=blocking)
    assert graph.num_ranks == schedule.num_ranks
    assert graph.num_ops == len(graph.phase) == len(graph.predecessors)
    for op, before in enumerate(graph.predecessors):
        assert all(0 <= other < op for other in before)
        assert len(set(before)) == len(before)
    sends = graph.phase == "SR"
    assert sorted(op for order in graph.orders for op in order) == np.flatnonzero(~sends).tolist()
    for rank, order in enumerate(graph.orders):
        assert list(order) == sorted(order)
        assert (graph.rank[list(order)] == rank).all()
    stage_to_rank = np.array(schedule.stage_to_rank)
    assert (graph.rank == stage_to_rank[graph.stage]).all()
    towards = np.where(graph.backward, -1, 1)[sends]
    assert (graph.peer[sends] == stage_to_rank[graph.stage[sends] + towards]).all()
    assert (graph.rank[sends] != graph.peer[sends]).all()
    assert (graph.peer[~sends] == -1).all()
    pairs = graph.phase == "FB"
    assert ((graph.other_stage >= 0) == pairs).all()
    assert ((graph.other_microbatch >= 0) == pairs).all()
    with pytest.raises(ValueError, match="read-only"):
        graph.stage[0] = 1


def test_every_tensor_that_changes_rank_is_sent_once():
    graph = ps.op_graph(ps.InterleavedOneFOneB(4, 8, 2))
    sends = graph.phase == "SR"
    assert sends.sum() == 2 * 8 * 7
    for op in np.flatnonzero(sends):
        (producer,) = graph.predecessors[op]
        assert graph.stage[producer] == graph.stage[op]
        assert graph.microbatch[producer] == graph.microbatch[op]
        assert graph.phase[producer] == ("B" if graph.backward[op] else "F")
    # Stages of one rank send nothing.
    assert not (ps.op_graph(ps.LoopedBFS(1, 3, 4)).phase == "SR").any()


def test_blocking_graph_by_hand():
    graph = ps.op_graph(ps.OneFOneB(2, 2), blocking=True)
    names = [
        f"{stage}{phase}{microbatch}"
        for phase, stage, microbatch in zip(graph.phase, graph.stage, graph.microbatch, strict=True)
    ]
    waits = {
        name + ("'" if gradient else ""): {names[op] for op in before}
        for name, gradient, before in zip(names, graph.backward, graph.predecessors, strict=True)
    }
    assert waits == {
        "0F0": set(),
        "0SR0": {"0F0"},
        "1F0": {"0SR0"},
        "0F1": {"0SR0"},
        "1B0": {"1F0"},
        # One batch: both tensors wait for both ranks, and both ranks for both tensors.
        "0SR1": {"0F1", "1B0"},
        "1SR0'": {"0F1", "1B0"},
        "0B0": {"0SR1", "1SR0"},
        "1F1": {"0SR1", "1SR0"},
        "1B1": {"1F1"},
        "1SR1'": {"0B0", "1B1"},
        "0B1": {"1SR1"},
    }
    assert [[names[op] for op in last] for last in graph.last] == [["0B1"], ["1SR1"]]


def test_two_chains():
    inferred = ps.CustomSchedule(dual_pipe, [0, 1, 1, 0])
    assert inferred == ps.CustomSchedule(dual_pipe, [0, 1, 1, 0], chains=[(0, 1), (2, 3)])
    assert inferred.chain_starts == (0, 2)
    with pytest.raises(ValueError, match=r"`2F0` \(stage 2, .* on rank 1 needs `1F0`"):
        ps.CustomSchedule(dual_pipe, [0, 1, 1, 0], chains=[(0, 3)])
    independent = ps.CustomSchedule([["0F0"], ["1F0"]], [0, 1], chains=[(0, 0), (1, 1)])
    assert ps.evaluate(independent, forward=[[2], [3]]).rank_ends.tolist() == [2, 3]
    for chains in ([(0, 1)], [(0, 2), (2, 3)], [(0, 1), (2, 4)], [(2, 3), (0, 1)]):
        with pytest.raises(ValueError, match="each of the stages 0 to 3 once, in order"):
            ps.CustomSchedule(dual_pipe, [0, 1, 1, 0], chains=chains)


def test_deadlock_names_an_op_of_the_cycle():
    crossed = ps.CustomSchedule(
        [["0F0", "0B0", "0F1", "0B1"], ["1F0", "1F1", "1B0", "1B1"]], [0, 1]
    )
    message = "The orders deadlock: `0B0` (stage 0, microbatch 0) on rank 0 waits for itself"
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        ps.op_graph(crossed)
    assert "`1B0` (stage 1, microbatch 0) on rank 1" in str(error.value)
    with pytest.raises(ValueError, match=r"deadlock.*the send_recv of the gradient of stage 1"):
        ps.op_graph(crossed, blocking=True)
    # Rank 1 takes its microbatches in another order, which only a rendezvous minds.
    swapped = ps.CustomSchedule([["0F0", "0F1"], ["1F1", "1F0"]], [0, 1])
    assert ps.evaluate(swapped, forward=1).makespan == 4
    with pytest.raises(ValueError, match=r"deadlock: `0F1`.* the send_recv of the activation"):
        ps.op_graph(swapped, blocking=True)


def test_registry():
    assert ps.make_schedule("gpipe", num_ranks=2, num_microbatches=3) == ps.GPipe(2, 3)
    assert ps.make_schedule("1f1b", num_ranks=2, num_microbatches=3) == ps.OneFOneB(2, 3)
    interleaved = ps.make_schedule(
        "interleaved-1f1b",
        num_ranks=2,
        num_microbatches=4,
        virtual_stages=3,
        microbatch_group_size=4,
    )
    assert interleaved == ps.InterleavedOneFOneB(2, 4, 3, 4)
    bfs = ps.make_schedule("looped-bfs", num_ranks=2, num_microbatches=4, virtual_stages=3)
    assert bfs == ps.LoopedBFS(2, 4, 3)
    greedy = ps.make_schedule("zb-greedy", num_ranks=2, num_microbatches=4, memory_limit=3)
    assert greedy == ps.ZBGreedy(2, 4, memory_limit=3)
    costs = {"forward": (1.0, 3.0), "backward_input": (2.0, 2.0), "backward_weight": (1.0, 1.0)}
    own = ps.ZBGreedy(2, 4, memory_limit=3, backward_weight=5.0)
    assert own.with_costs(**costs, send_recv=0.5) == dataclasses.replace(
        own, **(costs | {"backward_weight": 5.0, "send_recv": 0.5})
    )
    assert ps.ZBH1(2, 4).with_costs(**costs, send_recv=0.5) == ps.ZBH1(2, 4)
    assert all(issubclass(cls, ps.AbstractSchedule) for cls in ps.schedules().values())


@pytest.mark.parametrize(
    ("text", "name"), [("1F1B", "1f1b"), ("DualPipe", "dual-pipe"), ("zb_h1", "zb-h1")]
)
def test_schedules_are_known_in_any_spelling(text, name):
    options = {"num_ranks": 2, "num_microbatches": 8}
    assert ps.make_schedule(text, **options) == ps.make_schedule(name, **options)


def test_each_schedule_says_what_it_takes():
    kinds = {*ps.schedules().values(), ps.CustomSchedule, ps.ForwardOnly, ps.Repeated}
    for cls in (cls for cls in kinds if cls.__module__.startswith("prism_jax.")):
        taken, text = [*inspect.signature(cls).parameters], cls.__init__.__doc__ or ""
        assert "**Arguments:**" in text
        assert all(f"`{name}`" in text for name in taken), (cls, taken)
