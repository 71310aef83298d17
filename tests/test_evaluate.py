"""Timelines of schedules by hand and by laws; makespans and peaks of activations in closed form."""

import itertools as it
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import prism_jax as prism
import prism_jax.schedule as ps


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
    timeline = prism.evaluate(ps.OneFOneB(2, 2), forward=[[1, 2], [3, 4]], backward=5, send_recv=1)
    assert timeline.op == (["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"])
    assert [start.tolist() for start in timeline.start] == [[0, 1, 11, 20], [2, 5, 10, 14]]
    assert [end.tolist() for end in timeline.end] == [[1, 3, 16, 25], [5, 10, 14, 19]]
    assert timeline.makespan == 25
    assert timeline.rank_ends.tolist() == [25, 19]
    assert timeline.busy.tolist() == [13, 17]


def test_send_recv_has_a_direction():
    links = [[np.nan, 7], [2, np.nan]]
    timeline = prism.evaluate(ps.GPipe(2, 1), forward=1, backward=1, send_recv=links)
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
    schedule = ps.OneFOneB(2, 3)
    table = np.array([[1.0] * 3, [2.0] * 3])
    whole = prism.evaluate(schedule, forward=table, backward=2 * table)
    column = prism.evaluate(schedule, forward=table[:, :1], backward=2 * table[:, :1])
    assert whole.makespan == column.makespan
    # A custom schedule cannot know of microbatches that it never names.
    custom = prism.CustomSchedule(schedule.orders(), schedule.stage_to_rank)
    wide = np.array([[1.0] * 5, [2.0] * 5])
    assert prism.evaluate(custom, forward=wide, backward=2 * wide).makespan == whole.makespan


def test_costs_of_any_array_type():
    schedule = ps.OneFOneB(2, 3)
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
    for schedule in (
        ps.GPipe(p, m),
        ps.OneFOneB(p, m),
        ps.InterleavedOneFOneB(p, m, v),
        ps.LoopedBFS(p, m, v),
    ):
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
    timeline = prism.evaluate(ps.InterleavedOneFOneB(16, 256, 8), forward=1, backward=2)
    assert timeline.makespan == (256 * 8 + 15) * 3


# Forward, backward-input and backward-weight of one stage; the last ones reach every branch.
COSTS = [(1, 1, 1), (2, 3, 1), (10, 12, 7), (3, 1, 5), (1, 7, 2), (7, 2, 2)]


def makespan(schedule, cost, **options):
    f, i, w = cost
    timeline = ps.evaluate(schedule, forward=f, backward_input=i, backward_weight=w, **options)
    return timeline.makespan


def spans(schedule, cost):
    """From the first to the last op of each rank."""
    f, i, w = cost
    timeline = ps.evaluate(schedule, forward=f, backward_input=i, backward_weight=w)
    return [end[-1] - start[0] for start, end in zip(timeline.start, timeline.end, strict=True)]


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("p", [1, 2, 3, 5])
def test_closed_forms_of_makespans_with_one_stage_per_rank(p, cost):
    f, i, w = cost
    b = i + w
    for m in (1, 2, p, 2 * p + 1):
        for delay in (0, 2):
            gpipe = (m + p - 1) * (f + b) + 2 * (p - 1) * delay
            assert makespan(ps.GPipe(p, m), cost, send_recv=delay) == gpipe
        assert makespan(ps.OneFOneB(p, m), cost) == (m + p - 1) * (f + b)
    for m in (p, p + 1, 3 * p):
        expected = m * (f + b) + (p - 1) * max(f, i, f + i - w)
        assert makespan(ps.ZBH1(p, m), cost) == expected
    for m in (2 * p - 1, 2 * p, 4 * p):
        expected = m * (f + b) + (p - 1) * max(f, f + i - 2 * w, i - f)
        assert makespan(ps.ZBH2(p, m), cost) == expected
        assert spans(ps.ZBH2(p, m), (1, 1, 1)) == [3 * m] * p


@pytest.mark.parametrize("p", [2, 3, 4])
def test_send_recvs(p):
    """Small ones, which hide in the bubbles as far as they can."""
    for f, b in [(4, 4), (5, 9), (10, 6)]:
        for c in (1, 2):
            for m in (p, 2 * p, 4 * p):
                base = (m + p - 1) * (f + b)
                costs: dict[str, Any] = {"forward": f, "backward": b, "send_recv": c}
                exposed = 2 * c * ((p - 1) * m // p + p - 2)
                assert ps.evaluate(ps.OneFOneB(p, m), **costs).makespan == base + exposed
                exposed = c * (2 * m + 2 * p - 5) if p > 2 else c * (m + 1)
                blocking = ps.evaluate(ps.OneFOneB(p, m), **costs, blocking=True)
                assert blocking.makespan == base + exposed
                for v in (2, 3):
                    schedule = ps.InterleavedOneFOneB(p, m, v)
                    base = (m * v + p - 1) * (f + b)
                    found = ps.evaluate(schedule, **costs).makespan
                    assert found == base + 2 * c * (p * v - 1)


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("p", [1, 2, 4])
@pytest.mark.parametrize("v", [2, 3])
def test_several_stages_per_rank(p, v, cost):
    f, i, w = cost
    b = i + w
    for m in (p, 3 * p):
        both = (m * v + p - 1) * (f + b)
        assert makespan(ps.InterleavedOneFOneB(p, m, v), cost) == both
        assert makespan(ps.LoopedBFS(p, m, v), cost) == both
        expected = m * v * (f + b) + (p - 1) * max(f, i, f + i - w)
        assert makespan(ps.InterleavedZeroBubble(p, m, v), cost) == expected
    assert ps.InterleavedZeroBubble(p, 2 * p, 1).orders() == ps.ZBH1(p, 2 * p).orders()


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("p", [3, 4, 5])
def test_zbv(p, cost):
    f, i, w = cost
    late = max(
        (2 * p - 3) * f - (p - 2) * i,
        (p - 1) * i,
        i + (p - 2) * w,
        2 * (p - 1) * (i - w),
        f + (p - 2) * w,
        2 * (p - 1) * f - (p - 1) * i - w,
        (2 * p - 3) * f + i - (2 * p - 2) * w,
        2 * (p - 1) * f - (2 * p - 1) * w,
    )
    assert makespan(ps.ZBV(p, 2 * p), cost) == 4 * p * (f + i + w) + late
    for m in (2 * p, 3 * p):
        assert makespan(ps.ZBV(p, m), (1, 1, 1)) == 6 * m + p - 1


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("p", [2, 3, 4])
def test_overlapped_pairs(p, cost):
    """Where a pair costs the sum of its parts, DualPipe is half as deep."""
    f, i, w = cost
    b, more = i + w, max(0, i - w)
    late = max(2 * (p - 1) * f + (p - 1) * more, (p - 2) * f + (p - 1) * (i + more))
    for m in (2 * p, 3 * p):
        assert makespan(ps.DualPipeV(p, m), cost) == 2 * m * (f + b) + late
    for m in (4 * p, 6 * p):
        assert makespan(ps.DualPipe(2 * p, m), cost) == m * (f + b) + late


@pytest.mark.parametrize("p", [2, 3, 5])
def test_steps_without_a_barrier(p):
    """Each rank goes on at once: with ZB-H2 and equal costs nothing is left of the bubbles."""
    m = 2 * p + 1
    for steps in (1, 2, 4):
        assert makespan(ps.Repeated(ps.ZBH2(p, m), steps), (1, 1, 1)) == 3 * m * steps + p - 1
    for schedule in (ps.OneFOneB(p, m), ps.ZBH1(p, m), ps.ZBV(p, m), ps.DualPipeV(p, m)):
        for cost in COSTS[:3]:
            ends = [makespan(ps.Repeated(schedule, steps), cost) for steps in (1, 2, 3, 4)]
            later = [after - before for before, after in it.pairwise(ends)]
            assert max(spans(schedule, cost)) <= max(later) <= ends[0]
    both = ps.Repeated(ps.DualPipe(2, 4), 2)
    assert both.orders() == ps.CustomSchedule(both.orders(), both.stage_to_rank).orders()


@pytest.mark.parametrize("p", [2, 4, 6])
def test_chimera(p):
    """In one unit of microbatches, all but `p - 2` forwards and as many backwards are hidden."""
    costs: dict[str, Any] = {"forward": 1, "backward": 2}
    one = ps.Chimera(p, p)
    assert ps.evaluate(one, **costs).makespan == 3 * p + 2 * (p - 2)
    assert ps.peak_in_flight(one).tolist() == [
        min(p // 2, p - r) + min(p // 2, r + 1) for r in range(p)
    ]
    units = ps.Chimera(p, 3 * p + 2)
    assert ps.peak_in_flight(units).tolist() == ps.peak_in_flight(one).tolist()
    alone = ps.evaluate(ps.Chimera(p, 2), **costs).makespan + 3 * ps.evaluate(one, **costs).makespan
    assert ps.evaluate(units, **costs).makespan <= alone


@pytest.mark.parametrize("p", [2, 4])
def test_hanayo(p):
    """More waves, smaller bubbles, at the same activations in whole stages."""
    costs: dict[str, Any] = {"forward": 1, "backward": 2}
    for m in (p, 2 * p + 1):
        makespans = []
        for waves in (1, 2, 3):
            schedule = ps.Hanayo(p, m, 2 * waves)
            makespans.append(ps.evaluate(schedule, **costs).makespan / (2 * waves))
            assert ps.peak_in_flight(schedule).max() <= 2 * waves * p
        assert makespans == sorted(makespans, reverse=True)
        assert 3 * m < makespans[-1]


@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 7])
def test_v_blocks(p):
    """Peaks as stated; bubbles at most a half and two thirds of those of 1F1B at equal costs."""
    bubble = 6 * (p - 1)
    for m in (1, p, 3 * p):
        half, least = ps.VHalf(p, m), ps.VMin(p, m)
        assert ps.peak_in_flight(half).max() <= p + 2 + p % 2
        assert ps.peak_in_flight(least).max() <= 2 * (p + 2) // 3 + 2
        if m > p:
            assert makespan(half, (1, 1, 1)) <= 6 * m + bubble / 2
            assert makespan(least, (1, 1, 1)) <= 6 * m + bubble * 2 / 3 + 2


@pytest.mark.parametrize("virtual_stages", [1, 2])
def test_greedy_takes_less_time_with_more_memory(virtual_stages):
    """And no more of it than it is given."""
    costs: dict[str, Any] = {
        "forward": 5.0,
        "backward_input": 6.0,
        "backward_weight": 4.0,
        "send_recv": 1.0,
    }
    found = []
    for limit in (2, 4, 8, 16):
        schedule = ps.ZBGreedy(4, 8, virtual_stages, limit, **costs)
        assert ps.peak_in_flight(schedule).max() <= limit
        found.append(ps.evaluate(schedule, **costs).makespan)
        if limit == 8 * virtual_stages:
            by_hand = ps.ZBH2(4, 8) if virtual_stages == 1 else ps.ZBV(4, 8)
            assert found[-1] <= ps.evaluate(by_hand, **costs).makespan
    assert found == sorted(found, reverse=True)
    assert found[-1] < 0.7 * found[0]
    # Made for its costs: of each stage, and with a last one that has the head, too.
    forward = (*[1.0] * (4 * virtual_stages - 1), 3.0)
    tables: dict[str, Any] = {
        "forward": [[cost] for cost in forward],
        "backward_input": 1,
        "backward_weight": 1,
    }
    orders = [ps.ZBGreedy(4, 8, virtual_stages, forward=given) for given in (forward, None)]
    made, other = (ps.evaluate(schedule, **tables).makespan for schedule in orders)
    assert made <= other


@pytest.mark.parametrize("p", [2, 4, 6])
def test_peaks(p):
    m, v = 3 * p, 3

    def held(schedule, until="W"):
        return ps.peak_in_flight(schedule, until=until).tolist()

    ranks = range(p)
    assert held(ps.GPipe(p, m)) == [m] * p
    assert held(ps.OneFOneB(p, m)) == [p - r for r in ranks]
    assert held(ps.ZBH1(p, m)) == [p] * p
    assert held(ps.ZBH1(p, m), "I") == [p - r for r in ranks]
    assert held(ps.ZBH2(p, m)) == [2 * p - 1] * p
    assert held(ps.ZBH2(p, m), "I") == [2 * (p - r) - 1 for r in ranks]
    for few in (1, 2, m):
        expected = [min(few * v, 2 * (p - r - 1) + (v - 1) * p + 1) for r in ranks]
        assert held(ps.InterleavedOneFOneB(p, few, v)) == expected
        # One forward more is ahead, and one of the pair that ends its backward.
        expected = [min(few * v, 2 * (p - r - 1) + (v - 1) * p + 2) for r in ranks]
        assert held(ps.OverlappedOneFOneB(p, few, v)) == expected
    assert held(ps.LoopedBFS(p, m, v)) == [m * v] * p
    assert held(ps.InterleavedZeroBubble(p, m, v)) == [v * p] * p
    assert held(ps.ZBV(p, m)) == [2 * p] * p
    assert held(ps.DualPipeV(p, m)) == [2 * p + 1] * p
    assert held(ps.DualPipe(p, 2 * m)) == [p + 1] * p
