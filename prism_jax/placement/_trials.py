"""The figure of one placement after another, with common random numbers."""

import copy
import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float, Int, PRNGKeyArray

from ..analysis import AbstractObjective, bandwidth
from ..program import Program
from ._nodes import Nodes
from ._placed import Placed, placed, ready_slopes, replicas_ready


Order = Int[np.ndarray, " nodes"]

# So many op evaluations are made of each placement, if they show so many steps.
_OPS = 2**26
_STEPS = (1024, 4096)
# Where they do not, the mean of a replica is taken from a few steps, and its scatter from others.
_FEW = 32
_OTHERS = 8
_LIKENED_STEPS = 4096
# Of all placements together (some 10 s on two cores).
MOST_OPS = 2**31
# So many replicas times steps are remembered.
_MOST_REMEMBERED = 2**26
# Derivatives are taken of so many steps, those that matter most.
_SLOPES = 512


class Trials:
    """The figure of placements, the smaller the better, for a search.

    A replica's random numbers are those of its slowest GPU, so that the numbering of replicas makes
    no difference. Replicas are remembered, for an exchange of nodes changes only two.

    **Attributes:**

    - `nodes`, `steps`: what is placed, and the steps that the figure is of.
    - `tried`: how many placements were.
    """

    def __init__(
        self,
        program: Program,
        nodes: Nodes,
        objective: AbstractObjective,
        key: PRNGKeyArray,
        advance: Callable[[float], object] = lambda ops: None,
    ):
        each = program.num_ops * nodes.num_replicas
        count = min(_OPS // each, _STEPS[1])
        self.nodes, self.tried = nodes, 0
        if count >= _STEPS[0]:
            self.steps = placed(program, num_samples=count, key=key)
            self._cost, self._ready_of = count * program.num_ops, _simulated(self.steps)
        else:
            self.steps = placed(program, num_samples=_LIKENED_STEPS, key=key)
            self._cost, self._ready_of = _FEW * program.num_ops, _likened(self.steps)
        self._objective, self._sign = objective, 1
        self._left, self._advance = float(MOST_OPS), advance
        self._ready: dict[bytes, np.ndarray] = {}

    def reversed(self, share: float) -> "Trials":
        """The same, the larger the better, with a share of the work to do. Memory is shared."""
        other = copy.copy(self)
        other._sign, other._left, other.tried = -self._sign, share * MOST_OPS, 0
        return other

    @property
    def spent(self) -> bool:
        """Whether no more should be tried."""
        return self._left <= 0

    def values(self, orders: Sequence[Order]) -> Float[np.ndarray, " orders"]:
        """The figure for each order of nodes; less it, if reversed."""
        wanted = [self._replicas(order) for order in orders]
        self._simulate(wanted)
        self.tried += len(orders)
        # To look at a sample takes about a tenth as long as to evaluate an op.
        self._spend(len(orders) * self.nodes.num_replicas * self.steps.num_steps / 10)
        return np.array([self._sign * self._objective.value(self._times(one)) for one in wanted])

    def slopes(self, order: Order) -> Float[np.ndarray, "nodes pieces"]:
        """The derivative of the figure with respect to the factor of each piece of each place."""
        replicas = self._replicas(order)
        self._simulate([replicas])
        decisive = np.argmax([self._ready[name] for name in replicas], axis=0)
        rows, leaders = (np.array(x) for x in zip(*replicas.values(), strict=True))
        times = self._times(replicas)
        change = self._objective.slope(times, bandwidth(times)) * self.steps.factor
        some = np.argsort(-np.abs(change), kind="stable")[:_SLOPES]
        some = some[change[some] != 0]
        total = np.zeros((len(replicas), self.nodes.num_ranks))
        if len(some):
            mine = decisive[some]
            slopes = ready_slopes(self.steps, rows[mine], leaders[mine], some)
            np.add.at(total, mine, self._sign * change[some, None] * slopes)
            self._spend(4 * len(some) * self.steps.run.program.num_ops)
        return total.reshape(-1)[self.nodes.places]

    def _replicas(self, order: Order) -> dict[bytes, tuple[np.ndarray, int]]:
        """The factors of each replica's ranks and its slowest GPU, by a name."""
        rows, leaders = self.nodes.slowest(order)
        return {
            row.tobytes() + leader.tobytes(): (row, int(leader))
            for row, leader in zip(rows, leaders, strict=True)
        }

    def _simulate(self, wanted: list[dict[bytes, tuple[np.ndarray, int]]]) -> None:
        """Sees to it that some replicas are remembered."""
        if len(self._ready) * self.steps.num_steps > _MOST_REMEMBERED:
            self._ready.clear()
        new = {n: one for names in wanted for n, one in names.items() if n not in self._ready}
        if new:
            rows, leaders = (np.array(x) for x in zip(*new.values(), strict=True))
            self._ready |= zip(new, self._ready_of(rows, leaders), strict=True)
            self._spend(len(new) * self._cost)

    def _spend(self, ops: float) -> None:
        self._left -= ops
        self._advance(ops)

    def _times(self, replicas) -> Float[np.ndarray, " steps"]:
        latest = np.max([self._ready[name] for name in replicas], axis=0)
        return self.steps.factor * latest + self.steps.tail


_ReadyOf = Callable[[np.ndarray, np.ndarray], np.ndarray]


def _simulated(steps: Placed) -> _ReadyOf:
    def ready_of(rows, leaders):
        return replicas_ready(steps, rows, leaders)

    return ready_of


def _likened(steps: Placed) -> _ReadyOf:
    """What `replicas_ready` gives, nearly, of large jobs: the mean of a replica from a few steps,
    with the same random numbers for all; around it, what others with equal GPUs scatter.
    """
    ranks = steps.run.program.num_ranks
    others = replicas_ready(steps, np.ones((_OTHERS, ranks)), np.arange(_OTHERS))
    shared = others.mean(axis=0)
    scatter = (others - shared).reshape(-1) * math.sqrt(_OTHERS / (_OTHERS - 1))
    some = {name: getattr(steps, name)[:_FEW] for name in ("regimes", "factor", "tail")}
    few = dataclasses.replace(steps, **some)
    typical = replicas_ready(few, np.ones((1, ranks)), np.zeros(1, int)).mean()

    def ready_of(rows, leaders):
        level = replicas_ready(few, rows, np.zeros(len(rows), int)).mean(axis=1) / typical
        found = np.empty((len(rows), steps.num_steps), scatter.dtype)
        for i, leader in enumerate(leaders):
            rng = np.random.default_rng(int(leader))
            found[i] = level[i] * (shared + scatter[rng.integers(len(scatter), size=len(shared))])
        return found

    return ready_of
