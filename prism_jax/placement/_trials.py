"""The figure of one placement after another, with common random numbers."""

import copy
import dataclasses
import functools as ft
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax
import numpy as np
from jaxtyping import Float, Int

from ..analysis import AbstractObjective, bandwidth
from ..program import Program
from ._placed import Nodes, Placed, placed, ready_slopes, replicas_ready


Order = Int[np.ndarray, " nodes"]

# So many op evaluations are made of each placement, if they show so many steps.
_OPS = 2**26
_STEPS = (1024, 4096)
# Where they do not, the mean of a replica is taken from a few steps, the fewer the more ops there
# are to average over, and its scatter from others.
_FEW, _FEW_OPS = (8, 32), 2**15
_OTHERS = 8
_LIKENED_STEPS = 4096
# Of all placements together: some seconds on two cores.
_MOST_OPS, _MOST_OPS_LIKENED = 2**31, 2**29
# So many replicas times steps are remembered.
_MOST_REMEMBERED = 2**26
# Derivatives are taken of so many steps, those that matter most.
_SLOPES = 512


def most_ops(program: Program, nodes: Nodes) -> int:
    """How many ops a search may evaluate."""
    all_steps = _steps_of_all(program, nodes) >= _STEPS[0]
    return _MOST_OPS if all_steps else _MOST_OPS_LIKENED


def _steps_of_all(program: Program, nodes: Nodes) -> int:
    return min(_OPS // (program.num_ops * nodes.num_replicas), _STEPS[1])


class Trials:
    """The figure of placements, the smaller the better, for a search.

    A replica's random numbers are those of its slowest GPU, so that the numbering of replicas makes
    no difference. Replicas are remembered, for an exchange of nodes changes only two.

    **Attributes:**

    - `nodes`, `steps`: the nodes to place, and the steps of the figure.
    """

    def __init__(
        self,
        program: Program,
        nodes: Nodes,
        objective: AbstractObjective,
        key: "jax.Array",
        advance: Callable[[float], object] = lambda ops: None,
    ):
        count = _steps_of_all(program, nodes)
        self.nodes, self._tried = nodes, set[int]()
        likened = count < _STEPS[0]
        self.steps = placed(program, num_samples=_LIKENED_STEPS if likened else count, key=key)
        self._ready_of = ft.partial(replicas_ready, self.steps)
        if likened:
            count = int(np.clip(_FEW_OPS // program.num_ops, *_FEW))
            self._ready_of = _likened(self.steps, count)
        self._cost = count * program.num_ops
        self._objective, self._sign = objective, 1
        self._left, self._advance = float(most_ops(program, nodes)), advance
        self._ready: dict[bytes, np.ndarray] = {}

    def reversed(self, share: float) -> "Trials":
        """The same, the larger the better, with a share of the work to do. Memory is shared, and
        so is what was tried.
        """
        opposite = copy.copy(self)
        opposite._sign = -self._sign
        opposite._left = share * most_ops(self.steps.run.program, self.nodes)
        return opposite

    @property
    def tried(self) -> int:
        """How many placements were tried, each counted once."""
        return len(self._tried)

    @property
    def spent(self) -> bool:
        """Whether no more should be tried."""
        return self._left <= 0

    def values(self, orders: Sequence[Order]) -> Float[np.ndarray, " orders"]:
        """The figure for each order of nodes; less it, if reversed."""
        ready = self._ready_in([self._replicas(order) for order in orders])
        self._tried.update(hash(order.tobytes()) for order in orders)
        return self._figures(np.max(replicas, axis=0) for replicas in ready)

    def values_near(
        self, order: Order, neighbours: Sequence[Order]
    ) -> Float[np.ndarray, " orders"]:
        """`values` of `neighbours`, in which a few places have another node than in `order`: costs
        as much as the replicas there.
        """
        (ready,) = self._ready_in([self._replicas(order)])
        changed = [self._changed(order, neighbour) for neighbour in neighbours]
        pairs = zip(neighbours, changed, strict=True)
        moved = self._ready_in([self._replicas(*pair) for pair in pairs])
        self._tried.update(hash(neighbour.tobytes()) for neighbour in neighbours)
        latest_but = _latest_but(ready, max(map(len, changed)))
        pairs = zip(changed, moved, strict=True)
        return self._figures(np.max([latest_but(places), *rows], axis=0) for places, rows in pairs)

    def slopes(self, order: Order) -> Float[np.ndarray, "nodes pieces"]:
        """The derivative of the figure with respect to the factor of each piece of each place."""
        replicas = self._replicas(order)
        (ready,) = self._ready_in([replicas])
        decisive = np.argmax(ready, axis=0)
        rows, leaders = (np.array(x) for x in zip(*replicas.values(), strict=True))
        times = self.steps.times(ready.max(axis=0))
        change = self._objective.slope(times, bandwidth(times, self._objective)) * self.steps.factor
        chosen = np.argsort(-np.abs(change), kind="stable")[:_SLOPES]
        chosen = chosen[change[chosen] != 0]
        total = np.zeros((len(replicas), self.nodes.num_ranks))
        if len(chosen):
            latest = decisive[chosen]
            slopes = ready_slopes(self.steps, rows[latest], leaders[latest], chosen)
            np.add.at(total, latest, self._sign * change[chosen, None] * slopes)
            self._spend(4 * len(chosen) * self.steps.run.program.num_ops)
        return total.reshape(-1)[self.nodes.places]

    def _changed(self, order: Order, neighbour: Order) -> Int[np.ndarray, " changed"]:
        """The replicas of places that have another node."""
        return np.unique(self.nodes.places[order != neighbour] // self.nodes.num_ranks)

    def _replicas(
        self, order: Order, chosen: Int[np.ndarray, " chosen"] | slice = slice(None)
    ) -> dict[bytes, tuple[np.ndarray, int]]:
        """The factors of the ranks of each replica, or of some, and its slowest GPU, by a name."""
        rows, leaders = (x[chosen] for x in self.nodes.slowest(order))
        return {
            row.tobytes() + leader.tobytes(): (row, int(leader))
            for row, leader in zip(rows, leaders, strict=True)
        }

    def _ready_in(
        self, wanted: list[dict[bytes, tuple[np.ndarray, int]]]
    ) -> Iterator[Float[np.ndarray, "replicas steps"]]:
        """When the replicas of each dictionary are ready; those not remembered are simulated."""
        if len(self._ready) * self.steps.num_steps > _MOST_REMEMBERED:
            self._ready.clear()
        new = {n: gpus for names in wanted for n, gpus in names.items() if n not in self._ready}
        if new:
            rows, leaders = (np.array(x) for x in zip(*new.values(), strict=True))
            self._ready |= zip(new, self._ready_of(rows, leaders), strict=True)
            self._spend(len(new) * self._cost)
        for names in wanted:
            ready = [self._ready[name] for name in names]
            yield np.array(ready).reshape(len(ready), self.steps.num_steps)

    def _spend(self, ops: float) -> None:
        self._left -= ops
        self._advance(ops)

    def _figures(self, latest: Iterable[np.ndarray]) -> Float[np.ndarray, " orders"]:
        value, times = self._objective.value, self.steps.times
        return self._sign * np.array([value(times(ready)) for ready in latest])


def _latest_but(
    ready: Float[np.ndarray, "replicas steps"], most: int
) -> Callable[[np.ndarray], np.ndarray]:
    """A function that gives when the latest of all replicas is ready in each step, of all but some:
    by the latest few of each step, as no more than `most` are left out. It gives minus infinity
    where there are no others.
    """
    number = min(most + 1, len(ready))
    places = np.argpartition(-ready, number - 1, axis=0)[:number]
    order = np.argsort(-np.take_along_axis(ready, places, axis=0), axis=0)
    places = np.take_along_axis(places, order, axis=0)
    latest = np.take_along_axis(ready, places, axis=0)
    return lambda left_out: np.max(
        latest, axis=0, where=~np.isin(places, left_out), initial=-np.inf
    )


def _likened(steps: Placed, few: int) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """What `replicas_ready` gives, nearly, of large jobs: the mean of a replica from a few steps,
    with the same random numbers for all; around it, what others with equal GPUs scatter.
    """
    ranks = steps.run.program.num_ranks
    alike = replicas_ready(steps, np.ones((_OTHERS, ranks)), np.arange(_OTHERS))
    shared = alike.mean(axis=0)
    scatter = (alike - shared).reshape(-1) * math.sqrt(_OTHERS / (_OTHERS - 1))
    fields = {name: getattr(steps, name)[:few] for name in ("regimes", "factor", "tail")}
    first = dataclasses.replace(steps, **fields)
    typical = replicas_ready(first, np.ones((1, ranks)), np.zeros(1, int)).mean()

    def ready_of(rows, leaders):
        level = replicas_ready(first, rows, np.zeros(len(rows), int)).mean(axis=1) / typical
        ready = np.empty((len(rows), steps.num_steps), scatter.dtype)
        for i, leader in enumerate(leaders):
            rng = np.random.default_rng(int(leader))
            ready[i] = level[i] * (shared + scatter[rng.integers(len(scatter), size=len(shared))])
        return ready

    return ready_of
