"""Which replica decides each step."""

import dataclasses
import functools as ft

import equinox as eqx
import numpy as np

from ..program import Program, network_probabilities
from ._random import KeyData
from ._replica import TILE, stratum_weights
from ._replicas import Replicas, Selection, sample_weights, select


# An irrational stride, to deal out regimes evenly over any run of steps.
SILVER = np.sqrt(2) - 1
# The exact rule looks at the slowest samples of each pipeline rank: 14 in a step, on average.
_CANDIDATES = 14
_EXACT_BLOCK = 1024
# Ranks are dealt out evenly among the steps of a block, the slowest first, so that samples are
# looked up in the order in which they lie. A block is what a device composes in one batch.
STEP_TILES = 8
BLOCK = STEP_TILES * TILE


@dataclasses.dataclass(frozen=True)
class Decision:
    """How the steps of a run are decided.

    **Attributes:**

    - `kept`: replica samples.
    - `selections`: for each regime of the network, how a step picks among them.
    - `probabilities`: of the regimes.
    - `num_steps`: their number.
    - `offsets`: where the sequences start, from the key and the first id.
    - `rule`: `"vector"` or `"exact"`.
    - `one_each`: whether each step is one replica sample, in order.
    - `seed`: for the draws of the exact rule, which are made in blocks of steps.
    - `others`: of replicas that are unlike these, whose slowest counts too.
    - `shuffled`: whether ranks are dealt out in random order, so as to be independent of others'.
    """

    kept: Replicas
    selections: tuple[Selection, ...]
    probabilities: np.ndarray
    num_steps: int
    offsets: tuple[float, float]
    rule: str
    seed: tuple[int, int]
    one_each: bool = False
    others: tuple["Decision", ...] = ()
    shuffled: bool = False

    def regimes(self, steps: np.ndarray) -> np.ndarray:
        """The regime of the network in each step."""
        if len(self.selections) == 1:
            return np.zeros(len(steps), np.int64)
        uniform = np.modf(steps * SILVER + self.offsets[1])[0]
        return np.searchsorted(np.cumsum(self.probabilities)[:-1], uniform, "right")

    def ranks(self, first: int, count: int) -> np.ndarray:
        """The rank, among a step's replicas, of each step's decisive one: in (0, 1), 0 the slowest.
        One in each of as many equal parts as the block has steps, in ascending order.
        """
        starts = range(first, first + count, BLOCK)
        return np.concatenate([self._ranks_of_block(start) for start in starts])[:count]

    def _ranks_of_block(self, start: int) -> np.ndarray:
        size = min(BLOCK, self.num_steps - start)
        offset = (self.offsets[0] + _reversed(start // BLOCK)) % 1
        order = np.arange(size)
        if self.shuffled:
            counter = [0, 0, 2, self.kept.first + start]
            rng = np.random.Generator(np.random.Philox(key=list(self.seed), counter=counter))
            order = rng.permutation(size)
        return np.clip((order + offset) / size, 2.0**-53, 1 - 2.0**-53)

    def picks(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The regime of each step and its position in that regime's selection (vector rule).

        `first` counts from the start of the run, and is a multiple of `BLOCK`.
        """
        regimes = self.regimes(np.arange(first, first + count))
        ranks = self.ranks(first, count)
        if len(self.selections) == 1:
            return regimes, self.selections[0].pick(ranks)
        position = np.zeros(count, np.int64)
        for g, selection in enumerate(self.selections):
            members = np.flatnonzero(regimes == g)
            if len(members):
                position[members] = selection.pick(ranks[members])
        return regimes, position

    def samples(self, first: int, count: int) -> np.ndarray:
        """Which kept sample decides each step (vector rule)."""
        if self.one_each:
            return np.arange(first, first + count)
        regimes, position = self.picks(first, count)
        order, starts = self._orders
        return order.take(position if len(starts) == 1 else position + starts[regimes])

    @ft.cached_property
    def _orders(self) -> tuple[np.ndarray, np.ndarray]:
        """The orders of all selections, one after the other, and where each starts."""
        orders = [selection.order for selection in self.selections]
        return np.concatenate(orders), np.cumsum([0, *(len(order) for order in orders[:-1])])

    def inputs(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The ends of the pipeline ranks `(count, ranks)` and the regime, from id `first` on."""
        if self.others:
            mine, regimes = self._alone.inputs(first, count)
            rest = (other.inputs(first, count)[0] for other in self.others)
            return ft.reduce(np.maximum, rest, mine), regimes
        first -= self.kept.first
        regimes = self.regimes(np.arange(first, first + count)).astype(np.int32)
        if self.one_each:
            return self.kept.ends[first : first + count], regimes
        if self.rule == "vector":
            return self.kept.ends.take(self.samples(first, count), axis=0), regimes
        starts = range(first, first + count, _EXACT_BLOCK)
        return np.concatenate([self._exact(start) for start in starts])[:count], regimes

    @ft.cached_property
    def _alone(self) -> "Decision":
        return dataclasses.replace(self, others=())

    def _exact(self, first: int) -> np.ndarray:
        """The end of each pipeline rank's own slowest replica, in the block of steps from `first`:
        of R replicas, those are drawn that can be some rank's slowest.
        """
        regimes = self.regimes(np.arange(first, first + _EXACT_BLOCK))
        ends = np.zeros((_EXACT_BLOCK, self.kept.ends.shape[1]), self.kept.ends.dtype)
        counter = [0, 0, 0, self.kept.first + first]
        rng = np.random.Generator(np.random.Philox(key=list(self.seed), counter=counter))
        for g, selection in enumerate(self.selections):
            members = np.flatnonzero(regimes == g)
            if not len(members):
                continue
            mine, chosen = self._candidates[g]
            weights = selection.weights[chosen]
            drawn = rng.binomial(selection.num_replicas, min(weights.sum(), 1), len(members))
            drawn = np.maximum(drawn, 1)
            cumulative = np.cumsum(weights) / weights.sum()
            picked = np.searchsorted(cumulative, rng.random(drawn.sum()))
            starts = np.concatenate([[0], np.cumsum(drawn)[:-1]])
            values = mine[chosen[np.minimum(picked, len(chosen) - 1)]]
            ends[members] = np.maximum.reduceat(values, starts, axis=0)
        return ends

    @ft.cached_property
    def _candidates(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """For each regime, all ends in its selection's order, and which of them may be a rank's
        slowest.
        """
        found = []
        for selection in self.selections:
            mine = self.kept.ends[selection.order]
            share = _CANDIDATES / selection.num_replicas
            candidate = np.zeros(len(selection.order), bool)
            for row in mine.T:
                slowest = np.argsort(-row, kind="stable")
                above = np.cumsum(selection.weights[slowest]) - selection.weights[slowest]
                candidate[slowest[above < share]] = True
            found.append((mine, np.flatnonzero(candidate)))
        return found


def _reversed(number: int) -> float:
    """The radical inverse in base 2: offsets that deal out ranks evenly over blocks, too."""
    return int(f"{number:064b}"[::-1], 2) / 2**64


@dataclasses.dataclass(frozen=True)
class Chances:
    """How likely a program's strata and regimes of the network are, on the host."""

    strata: np.ndarray
    network: np.ndarray


def chances(program: Program) -> Chances:
    """See [`Chances`][]. To be called where the devices are, as all that is computed by JAX."""
    strata, network = (np.asarray(x, np.float64) for x in _chances(program))
    return Chances(strata, network / network.sum())


@eqx.filter_jit
def _chances(program: Program):
    return stratum_weights(program), network_probabilities(program)


def decide(
    program: Program,
    chances: Chances,
    kept: Replicas,
    key: KeyData,
    num_steps: int,
    *,
    explicit: bool = False,
    rule: str = "vector",
    num_replicas: int | None = None,
) -> Decision:
    """Sets up how steps are decided. With `explicit`, each kept sample is the slowest of a whole
    step's replicas already. `num_replicas` is that of the program by default.
    """
    weights = sample_weights(program, chances.strata, kept)
    regime = np.array([s.regime for s in program.strata])[kept.stratum]
    probabilities = chances.network
    present = np.bincount(regime, minlength=len(probabilities)) > 0
    if not present.all():  # Only in runs of a handful of samples.
        probabilities = np.where(present, probabilities, 0) / probabilities[present].sum()
    if num_replicas is None:
        num_replicas = program.num_replicas
    replicas = 1 if explicit else num_replicas
    words = [int(word) for word in np.asarray(key)]
    rng = np.random.Generator(np.random.Philox(key=words, counter=[0, 0, 1, kept.first]))
    first, second = rng.random(2)
    # A single replica whose samples weigh the same needs no picking, and their order none either.
    one_each = rule == "vector" and replicas == len(probabilities) == 1
    one_each &= len(kept.counts) == 1 and len(weights) == num_steps
    one_each = one_each and bool(weights.min() == weights.max())
    if one_each:
        one, none = np.ones(1), np.zeros(1)
        selections = (Selection(np.arange(num_steps), weights, kept.stratum, 1, one, none),)
    else:
        selections = tuple(
            select(kept, weights, regime == g, replicas, whole=rule == "exact")
            for g in range(len(probabilities))
        )
    return Decision(
        kept=kept,
        selections=selections,
        probabilities=probabilities,
        num_steps=num_steps,
        offsets=(float(first), float(second)),
        rule=rule,
        seed=(words[0], words[1]),
        one_each=one_each,
    )
