import dataclasses
import functools as ft
from collections.abc import Iterator, Sequence
from typing import ClassVar

from ._base import AbstractCounted, check_positive, described
from ._custom import CustomSchedule
from ._evaluate import evaluate
from ._fill import Pipe, Rule, fill
from ._in_turns import ZBH1, ZBH2, alternate
from ._ops import peak_in_flight
from ._v_shape import ZBV, VHalf, VMin, v_shape


Cost = float | tuple[float, ...]


@described
class ZBGreedy(AbstractCounted):
    """The best zero-bubble schedule that list scheduling finds for given costs and memory.

    It starts from handcrafted zero-bubble orders that fit into the memory, and moves ops forward
    into bubbles by several priority rules. The order with the shortest makespan is taken; among
    equals, that with the shortest time from the first to the last op of a rank. Two stages on a
    rank are placed in a V.

    Costs are optional. Without them, the schedule uses the costs of the program that it is compiled
    to; outside of a program, every op costs one and send_recvs cost nothing.

    **Arguments:**

    - `num_ranks`: the number of pipeline ranks.
    - `num_microbatches`: the number of microbatches in a step.
    - `virtual_stages`: the number of stages on each rank, one or two.
    - `memory_limit`: the most (stage, microbatch) pairs whose activations a rank may hold. Default
        `num_ranks * virtual_stages`, which is what the first rank holds in 1F1B.
    - `forward`, `backward_input`, `backward_weight`: the cost of an op: one number, or one for each
        stage.
    - `send_recv`: the cost of sending a tensor to another rank.
    """

    kind: ClassVar[str] = "zb-greedy"

    virtual_stages: int = 1
    memory_limit: int | None = None
    forward: Cost | None = None
    backward_input: Cost | None = None
    backward_weight: Cost | None = None
    send_recv: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(virtual_stages=self.virtual_stages)
        if self.virtual_stages > 2:
            raise ValueError(
                f"`virtual_stages={self.virtual_stages}` does not fit `{self.kind}`, which places "
                "one or two stages on each rank; use 1 or 2."
            )
        if self.memory_limit is not None and not self.memory_limit >= self.virtual_stages:
            raise ValueError(
                f"`memory_limit={self.memory_limit}` is too small for a microbatch in "
                f"{self.virtual_stages} stages; use {self.virtual_stages} or more."
            )
        for name in ("forward", "backward_input", "backward_weight"):
            costs = getattr(self, name)
            if isinstance(costs, tuple) and len(costs) != self.num_stages:
                raise ValueError(
                    f"`{name}` has {len(costs)} costs, but there are {self.num_stages} stages; "
                    "give one for each."
                )

    @property
    def stage_to_rank(self) -> tuple[int, ...]:
        return v_shape(self.num_ranks)[: self.num_ranks * self.virtual_stages]

    def with_costs(
        self,
        *,
        forward: tuple[float, ...],
        backward_input: tuple[float, ...],
        backward_weight: tuple[float, ...],
        send_recv: float,
    ) -> "ZBGreedy":
        costs = {
            "forward": forward,
            "backward_input": backward_input,
            "backward_weight": backward_weight,
            "send_recv": send_recv,
        }
        missing = {name: cost for name, cost in costs.items() if getattr(self, name) is None}
        return dataclasses.replace(self, **missing)

    def orders(self) -> list[list[str]]:
        return [list(order) for order in _best(self)]


# Each of these is the best in some of the reference cases, and no other improves on all of them.
_RULES = (
    Rule(weights_late=False, patience={"W": 0.5}),
    Rule(weights_late=True, patience={}),
    Rule(weights_late=True, patience={"F": 0.5, "W": 0.5}),
    Rule(weights_late=True, patience={"F": 1.0, "W": 0.5}),
)


# Orders are expensive and needed often, so they are cached.
@ft.lru_cache(maxsize=16)
def _best(schedule: ZBGreedy) -> tuple[tuple[str, ...], ...]:
    places = schedule.stage_to_rank
    limit = schedule.memory_limit or schedule.num_ranks * schedule.virtual_stages
    costs = {
        name: _by_stage(getattr(schedule, name), len(places))
        for name in ("forward", "backward_input", "backward_weight")
    }
    of_phase = dict(zip("FIW", costs.values(), strict=True))
    delay = schedule.send_recv or 0.0
    pipe = Pipe(places, cost=lambda phase, stage: of_phase[phase][stage], send_recv=delay)
    # Arrays over stages and microbatches.
    tables = {name: [[cost] for cost in column] for name, column in costs.items()}

    def score(orders: list[list[str]]) -> tuple[float, float]:
        candidate = CustomSchedule(orders, places)
        timeline = evaluate(candidate, **tables, send_recv=delay)  # pyright: ignore[reportArgumentType]
        ends = zip(timeline.start, timeline.end, strict=True)
        return timeline.makespan, max(float(end[-1] - start[0]) for start, end in ends)

    limits = [limit] * schedule.num_ranks
    tried = (
        orders
        for base in _bases(schedule, limit)
        for orders in (base, *(fill(base, pipe, limits, rule) for rule in _RULES))
    )
    return tuple(map(tuple, min(tried, key=score)))


def _bases(schedule: ZBGreedy, limit: int) -> Iterator[list[list[str]]]:
    """Orders that hold no more than the limit."""
    p, m = schedule.num_ranks, schedule.num_microbatches
    by_hand = (ZBH1, ZBH2) if schedule.virtual_stages == 1 else (ZBV, VHalf, VMin)
    made = (kind(p, m) for kind in by_hand)
    fitting = [built.orders() for built in made if peak_in_flight(built).max() <= limit]
    yield from fitting
    if schedule.virtual_stages == 1 or not fitting:
        yield [_plain_order(schedule, limit, rank) for rank in range(p)]


def _plain_order(schedule: ZBGreedy, limit: int, rank: int) -> list[str]:
    """1F1B within the limit or, with two stages, one microbatch at a time."""
    p, microbatches = schedule.num_ranks, range(schedule.num_microbatches)
    if schedule.virtual_stages == 2:
        down, up = rank, 2 * p - 1 - rank
        ops = f"{down}F", f"{up}F", f"{up}I", f"{up}W", f"{down}I", f"{down}W"
        return [f"{op}{i}" for i in microbatches for op in ops]
    tokens = ([f"{rank}{x}{i}" for i in microbatches] for x in "FIW")
    return alternate(tokens, min(p - 1 - rank, limit - 1))


def _by_stage(cost: Cost | None, num_stages: int) -> Sequence[float]:
    return cost if isinstance(cost, tuple) else [1.0 if cost is None else cost] * num_stages
