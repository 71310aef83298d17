"""Every order, makespan and op time of the oracles, exactly."""

import hashlib
import json
import re
from typing import Any

import numpy as np
import pytest

import prism_jax.schedule as ps


# Those that PyTorch prints. Its Megatron-like interleaving differs where p does not divide m.
TORCH = [
    "GPipe",
    "1F1B",
    "Interleaved1F1B",
    "LoopedBFS",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
]
FAMILIES = [*TORCH, "MegatronInterleaved", "ZB-H1", "ZB-H2", "DualPipe"]


@pytest.fixture(scope="session")
def makespans(shared):
    return json.loads((shared / "oracles" / "makespans.json").read_text())


@pytest.fixture(scope="session")
def torch_cases(shared):
    cases = json.loads((shared / "oracles" / "torch_schedules.json").read_text())["cases"]
    return {case["key"]: case for case in cases}


def family(key):
    return key.split("/")[0]


def sizes(key):
    found = re.search(r"/p(\d+)/m(\d+)(?:/v(\d+))?", key)
    return tuple(int(n) for n in found.groups(default=1))


def generated(key):
    """The schedule of a case."""
    p, m, v = sizes(key)
    # PyTorch's size of a group of microbatches.
    group = m // max(1, m // p)
    make = {
        "GPipe": lambda: ps.GPipe(p, m),
        "1F1B": lambda: ps.OneFOneB(p, m),
        "Interleaved1F1B": lambda: ps.InterleavedOneFOneB(p, m, v, microbatch_group_size=group),
        "MegatronInterleaved": lambda: ps.InterleavedOneFOneB(p, m, v),
        "LoopedBFS": lambda: ps.LoopedBFS(p, m, v),
        "ZB-H1": lambda: ps.ZBH1(p, m),
        "ZB-H2": lambda: ps.ZBH2(p, m),
        "InterleavedZeroBubble": lambda: ps.InterleavedZeroBubble(p, m, v, group),
        "ZBVZeroBubble": lambda: ps.ZBV(p, m),
        "DualPipe": lambda: ps.DualPipe(p, m),
        "DualPipeV": lambda: ps.DualPipeV(p, m),
    }
    return make[family(key)]()


def torch_order(case):
    return [
        [token for token in row.split() if token != "_" and not token.endswith("REDUCE_GRAD")]
        for row in case["padded"]
    ]


def reference(key, makespans, torch_cases):
    """The order of a case as the oracle has it, with the placement and the chains of stages."""
    if key in makespans["ref_orders"]:
        case = makespans["ref_orders"][key]
        orders = [row.split() for row in case["order"]]
        return orders, tuple(case["stage_to_rank"]), [tuple(chain) for chain in case["chains"]]
    case = torch_cases[key]
    return torch_order(case), tuple(case["stage_to_rank"]), [(0, case["n_stages"] - 1)]


def costs(table, num_stages, num_microbatches, num_ranks) -> dict[str, Any]:
    """The cost tables that `meta.doc` gives by formulas."""
    s, m = np.ogrid[:num_stages, :num_microbatches]

    def h(t, m, k):
        return 1 + ((31 * s + 17 * m + 7 * t + 13 * k + 5 * s * m) % 19)

    if table in ("U0", "U1", "FBx"):
        f, i, w = (10, 12, 7) if table == "FBx" else (1, 1, 1)
        return {
            "forward": f,
            "backward_input": i,
            "backward_weight": w,
            "send_recv": 0 if table == "U0" else 1,
        }
    kind, k = table[0], int(table[1:])
    if kind == "S":
        m = np.zeros_like(m)
        send_recv = k % 4
    else:
        a, b = np.ogrid[:num_ranks, :num_ranks]
        send_recv = (3 * a + 5 * b + k) % 7
    given = {
        "forward": h(0, m, k),
        "backward_input": h(1, m, k),
        "backward_weight": h(2, m, k),
        "send_recv": send_recv,
    }
    if kind == "N":
        given["backward"] = h(3, m, k)
    return given


def digest(timeline):
    text = hashlib.sha256()
    for tokens, starts, ends in zip(timeline.op, timeline.start, timeline.end, strict=True):
        times = zip(tokens, starts.tolist(), ends.tolist(), strict=True)
        text.update("".join(f"{token}@{int(s)}-{int(e)}\n" for token, s, e in times).encode())
    return text.hexdigest()[:16]


def test_families_are_all_there(makespans):
    assert {family(key) for key in makespans["makespans"]} == set(FAMILIES)


@pytest.mark.parametrize("name", FAMILIES)
def test_makespans(name, makespans, torch_cases):
    cases = [one for one in makespans["makespans"].items() if family(one[0]) == name]
    for key, case in cases:
        orders, stage_to_rank, chains = reference(key, makespans, torch_cases)
        schedule = generated(key)
        assert schedule.orders() == orders, key
        assert schedule.stage_to_rank == stage_to_rank, key
        assert schedule.chain_starts == tuple(chain[0] for chain in chains), key
        assert ps.peak_in_flight(schedule).tolist() == case["peaks_W"], key
        assert ps.peak_in_flight(schedule, until="I").tolist() == case["peaks_I"], key
        assert ps.CustomSchedule(orders, stage_to_rank).chain_starts == schedule.chain_starts, key
        shape = schedule.num_stages, schedule.num_microbatches, schedule.num_ranks
        for variant, (makespan, ends, busy, starts, expected) in case["r"].items():
            table, _, overlap = variant.partition("/")
            timeline = ps.evaluate(schedule, overlap=overlap or "sum", **costs(table, *shape))
            where = f"{key} {variant}"
            assert timeline.makespan == makespan, where
            assert timeline.rank_ends.tolist() == ends, where
            assert [end[-1] for end in timeline.end] == ends, where
            assert timeline.busy.tolist() == busy, where
            assert [start[0] for start in timeline.start] == starts, where
            assert digest(timeline) == expected, where


@pytest.mark.parametrize("name", TORCH)
def test_orders_equal_those_of_torch(name, torch_cases):
    cases = [case for key, case in torch_cases.items() if family(key) == name]
    assert cases
    for case in cases:
        schedule = generated(case["key"])
        ours, theirs = schedule.orders(), torch_order(case)
        if name == "1F1B":
            # PyTorch 2.13 prints the forwards of the last rank as 1 to m, where 0 to m - 1 run.
            last = case["pp"] - 1
            theirs[last] = [
                f"{last}F{int(token.split('F')[1]) - 1}" if "F" in token else token
                for token in theirs[last]
            ]
        assert ours == theirs, case["key"]
        assert schedule.stage_to_rank == tuple(case["stage_to_rank"])


def test_torch_has_no_other_schedules(torch_cases):
    assert {family(key) for key in torch_cases} == set(TORCH)


def test_files_of_torch_are_read(torch_cases, tmp_path):
    """As it prints them, with idle slots, and lowered, with communication."""
    lowered = [case for case in torch_cases.values() if case.get("lowered")]
    assert lowered
    for case in lowered:
        if case["key"].startswith("1F1B"):
            continue  # Its last rank is wrong, as above.
        for rows in (case["padded"], case["lowered"]):
            text = "\n".join(",".join(row.split()).replace("_,", ",") for row in rows)
            (tmp_path / "schedule.csv").write_text(re.sub(r"(?<=,)_(?=\n|$)", "", text) + "\n")
            schedule = ps.load_schedule(tmp_path / "schedule.csv")
            assert schedule.orders() == generated(case["key"]).orders(), case["key"]
            assert schedule.stage_to_rank == tuple(case["stage_to_rank"])


def test_rendezvous(makespans):
    assert makespans["rendezvous"]
    for key, (makespan, ends, delay) in makespans["rendezvous"].items():
        p, m, _ = sizes(key)
        table = key.split("/")[-1].removesuffix("c3")
        given = costs(table, p, m, p) | {"send_recv": delay}
        timeline = ps.evaluate(ps.OneFOneB(p, m), **given, blocking=True)
        assert timeline.makespan == makespan, key
        assert timeline.rank_ends.tolist() == ends, key


def test_deadlocks(makespans):
    assert len(makespans["meta"]["deadlocks"]) == 11
    for key, _ in makespans["meta"]["deadlocks"]:
        p, m, v = sizes(key)
        with pytest.raises(ValueError, match=r"deadlock: .*stage \d+, microbatch \d+.* rank \d+"):
            ps.evaluate(ps.InterleavedOneFOneB(p, m, v), forward=1, backward=2)


@pytest.fixture(scope="session")
def heuristics(shared):
    return json.loads((shared / "oracles" / "zero_bubble_schedules.json").read_text())["cases"]


def _costs(case) -> dict[str, Any]:
    names = {"forward": "F", "backward_input": "I", "backward_weight": "W", "send_recv": "delay"}
    return {name: float(case["cost"][key]) for name, key in names.items()}


def test_zero_bubble_heuristics(heuristics):
    assert heuristics
    for case in heuristics:
        schedule = ps.CustomSchedule([row.split() for row in case["order"]], case["stage_to_rank"])
        timeline = ps.evaluate(schedule, **_costs(case))
        assert timeline.makespan == case["makespan"], case["key"]
        spans = [e[-1] - s[0] for s, e in zip(timeline.start, timeline.end, strict=True)]
        assert max(spans) == case["max_rank_span"], case["key"]


@pytest.mark.parametrize("most", [8, pytest.param(32, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["V-half", "V-min", "ZB-greedy", "ZBV-greedy"])
def test_heuristics_are_no_worse_than_those_published(name, most, heuristics):
    """In makespan and in memory: those are heuristics, and ours are other ones."""
    cases = [case for case in heuristics if case["schedule"] == name and case["m"] <= most]
    assert cases
    for case in cases:
        p, m, costs = case["pp"], case["m"], _costs(case)
        theirs = ps.CustomSchedule([row.split() for row in case["order"]], case["stage_to_rank"])
        limit = case["mem_limit"] or ps.peak_in_flight(theirs).max()
        ours = {
            "V-half": lambda p=p, m=m: ps.VHalf(p, m),
            "V-min": lambda p=p, m=m: ps.VMin(p, m),
        }.get(
            name, lambda p=p, m=m, c=case: ps.ZBGreedy(p, m, c["v"], c["mem_limit"], **_costs(c))
        )()
        assert ps.peak_in_flight(ours).max() <= limit, case["key"]
        # Of the V-shaped ones, the orders for slow backward-inputs are up to 0.6 % longer.
        allowed = 1.01 if name == "ZBV-greedy" else 1.0
        assert ps.evaluate(ours, **costs).makespan <= allowed * case["makespan"], case["key"]
