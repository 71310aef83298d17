from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import prism_jax as prism
from prism_jax.schedule import GPipe, InterleavedOneFOneB, LoopedBFS, OneFOneB


def split(schedule):
    """The same orders, with a backward-input and a backward-weight for each backward."""
    orders = []
    for order in schedule.orders():
        orders.append([])
        for token in order:
            halves = [token.replace("B", "I"), token.replace("B", "W")]
            orders[-1] += halves if "B" in token else [token]
    return prism.CustomSchedule(orders, schedule.stage_to_rank)


def test_timeline_by_hand():
    timeline = prism.evaluate(OneFOneB(2, 2), forward=[[1, 2], [3, 4]], backward=5, send_recv=1)
    assert timeline.op == (["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"])
    assert [start.tolist() for start in timeline.start] == [[0, 1, 11, 20], [2, 5, 10, 14]]
    assert [end.tolist() for end in timeline.end] == [[1, 3, 16, 25], [5, 10, 14, 19]]
    assert timeline.makespan == 25
    assert timeline.rank_ends.tolist() == [25, 19]
    assert timeline.busy.tolist() == [13, 17]


def test_send_recv_has_a_direction():
    links = [[np.nan, 7], [2, np.nan]]
    timeline = prism.evaluate(GPipe(2, 1), forward=1, backward=1, send_recv=links)
    assert timeline.start[1].tolist() == [8, 9]
    assert timeline.start[0].tolist() == [0, 12]


@pytest.mark.parametrize("overlap", ["sum", "max"])
def test_overlapped_pair(overlap):
    schedule = prism.CustomSchedule([["0F0", "(0F1;0B0)OVERLAP_F_B", "0B1"]], [0])
    timeline = prism.evaluate(
        schedule,
        forward=[[1, 2]],
        backward_input=[[3, 5]],
        backward_weight=[[1, 1]],
        overlap=overlap,
    )
    assert timeline.end[0].tolist() == ([1, 7, 13] if overlap == "sum" else [1, 5, 11])


def test_costs_broadcast():
    schedule = OneFOneB(2, 3)
    table = np.array([[1.0] * 3, [2.0] * 3])
    whole = prism.evaluate(schedule, forward=table, backward=2 * table)
    column = prism.evaluate(schedule, forward=table[:, :1], backward=2 * table[:, :1])
    assert whole.makespan == column.makespan
    # A custom schedule cannot know of microbatches that it never names.
    custom = prism.CustomSchedule(schedule.orders(), schedule.stage_to_rank)
    wide = np.array([[1.0] * 5, [2.0] * 5])
    assert prism.evaluate(custom, forward=wide, backward=2 * wide).makespan == whole.makespan


def test_costs_of_any_array_type():
    schedule = OneFOneB(2, 3)
    expected = prism.evaluate(schedule, forward=[[1, 1, 1], [2, 2, 2]], backward=3).makespan
    for dtype in (jnp.int32, jnp.float32, np.int64, np.float32):
        module = jnp if dtype in (jnp.int32, jnp.float32) else np
        forward = module.asarray([[1, 1, 1], [2, 2, 2]], dtype)
        assert prism.evaluate(schedule, forward=forward, backward=dtype(3)).makespan == expected


def test_rank_without_ops():
    timeline = prism.evaluate(prism.CustomSchedule([["0F0"], []], [0, 1]), forward=2)
    assert timeline.rank_ends.tolist() == [2, 0]
    assert timeline.busy.tolist() == [2, 0]
    assert timeline.start[1].shape == (0,)


@pytest.mark.parametrize("seed", range(5))
def test_laws(seed):
    rng = np.random.default_rng(seed)
    p, m, v = 4, 8, 2
    for schedule in (GPipe(p, m), OneFOneB(p, m), InterleavedOneFOneB(p, m, v), LoopedBFS(p, m, v)):
        shape = schedule.num_stages, schedule.num_microbatches
        costs: dict[str, Any] = {
            "forward": rng.integers(0, 50, shape),
            "backward": rng.integers(0, 50, shape),
            "send_recv": rng.integers(0, 9, (p, p)),
        }
        timeline = prism.evaluate(schedule, **costs)
        assert timeline.busy.max() <= timeline.makespan
        assert timeline.makespan == timeline.rank_ends.max()
        total = costs["forward"].sum() + costs["backward"].sum()
        assert timeline.busy.sum() == total
        # Costs in another unit; costs that are no smaller; ranks that must meet to send.
        assert prism.evaluate(schedule, **{k: 3 * c for k, c in costs.items()}).makespan == (
            3 * timeline.makespan
        )
        assert prism.evaluate(schedule, **{k: c + 1 for k, c in costs.items()}).makespan > (
            timeline.makespan
        )
        if schedule.num_stages == p:
            assert prism.evaluate(schedule, **costs, blocking=True).makespan >= timeline.makespan
        halves = prism.evaluate(
            split(schedule),
            forward=costs["forward"],
            backward_input=costs["backward"],
            backward_weight=np.zeros(shape),
            send_recv=costs["send_recv"],
        )
        assert halves.makespan == timeline.makespan


def test_large_schedule():
    # 130,560 ops.
    timeline = prism.evaluate(InterleavedOneFOneB(16, 256, 8), forward=1, backward=2)
    assert timeline.makespan == (256 * 8 + 15) * 3
