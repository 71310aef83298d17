"""How the samples of a run are drawn."""

import abc
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, PRNGKeyArray

from ..law import Law, merge_allocations, merge_chunks, merge_randomisations
from ..program import Program
from ..replica import (
    Lead,
    Sampled,
    by_strata,
    given_scores,
    leading_axes,
    mean_reductions,
    num_axes,
    poisson_stalls,
    regimes_and_stalls,
    replica_ends,
    sobol_scores,
    stratum_of,
    tiles,
    tiles_of,
    without_steps,
)
from ..step import EXTREMES, RESERVOIR
from ._draw import Draws, parts
from ._prepare import Run


# Independent scramblings of the Sobol points.
RANDOMISATIONS = 16
_MOST_LAWS = 16
# The pilots that find the leading axes and set the grid always use this key, so that results of
# other keys can be merged.
_PILOT_SEED = 0


def pilot_key() -> PRNGKeyArray:
    return jax.random.key(_PILOT_SEED)


class AbstractSampling(abc.ABC):
    """How replica samples are drawn: in chunks, which are independent. The law is that of the
    steps of all.
    """

    name: ClassVar[str]  # For users, and in files of laws.
    lead: Lead | None = None  # The leading axes, if samples are not drawn by their law alone.

    @abc.abstractmethod
    def chunks(self, program: Program, num_steps: int) -> int:
        """Into how many chunks a run is divided."""

    @abc.abstractmethod
    def samples(self, run: Run, draws: Sequence[Draws]) -> Iterator[tuple[np.ndarray, ...]]:
        """The samples of chunks, at most one chunk at a time: ids, ends `(n, sinks)`, scores,
        strata and likelihoods.
        """

    def replicas(self, num_steps: int) -> int:
        """How many samples a chunk of so many steps has."""
        return num_steps

    def num_replicas(self, program: Program) -> int:
        """Of how many samples a step takes the slowest."""
        return program.num_replicas

    def points(self, run: Run, draws: Draws) -> Float[np.ndarray, "samples axes"] | None:
        """The scores of the leading axes of a chunk, where they are not drawn."""
        del run, draws

    def merged(self, laws: list[Law]) -> Law:
        """The law of all chunks from the law of each."""
        return merge_chunks(laws)

    def compacted(self, laws: list[Law]) -> list[Law]:
        """The same laws, or fewer of more chunks, so that memory stays flat."""
        return [merge_chunks(laws)] if len(laws) == _MOST_LAWS else laws


class AbstractOfOneReplica(AbstractSampling):
    """Draws samples of one replica."""

    def samples(self, run: Run, draws: Sequence[Draws]) -> Iterator[tuple[np.ndarray, ...]]:
        # Short chunks share tiles.
        ends, points = np.cumsum([mine.replicas for mine in draws]), self.points(run, draws[0])

        def ids_of(first, count):
            for k, start, end in parts(ends, first, count):
                yield np.arange(draws[k].first + start, draws[k].first + end, dtype=np.uint32)

        def inputs(first, count):
            ids = np.concatenate([*ids_of(first, count)])
            return (ids,) if points is None else (ids, points[first : first + count])

        plan, size = without_steps(run.plan), tiles_of(run.plan)
        shared = (plan, self.lead, run.key)
        for batch in tiles(_replica_tile, shared, int(ends[-1]), inputs, per_batch=size):
            found, start = batch.samples(), 0
            for ids in ids_of(batch.first, batch.count):
                latest, *rest = (x[start : start + len(ids)] for x in found)
                yield ids, latest[:, : run.program.sinks.number], *rest
                start += len(ids)


def _replica_tile(shared, _, ids, *points):
    """One tile: ends `(samples, sinks)`, score, stratum and likelihood."""
    plan, lead, key = shared
    given, likelihood = given_scores(lead, ids, key, *points)
    sampled = by_strata(plan, ids, given)
    ends = replica_ends(plan, sampled, key)
    score = jnp.max(ends + mean_reductions(plan)[:, sampled.regimes], axis=0)
    return ends.T, score, stratum_of(plan.structure.strata, ids), likelihood


@dataclasses.dataclass(frozen=True)
class Plain(AbstractOfOneReplica):
    """By their law."""

    name = "plain"

    def chunks(self, program: Program, num_steps: int) -> int:
        # A short chunk leans: by R / 2 over its length, in the logarithm of the chance that no
        # replica is slower. All samples that steps reach are kept up to the second length.
        reach = math.sqrt(2 * program.num_replicas * num_steps)
        reach = max(reach, program.num_replicas * EXTREMES / 25)
        return math.ceil(num_steps / max(RESERVOIR, min(reach, num_steps)))


@dataclasses.dataclass(frozen=True)
class Importance(AbstractOfOneReplica):
    """Half of them slower than their law, and weighted."""

    name = "importance"
    lead: Lead

    def chunks(self, program: Program, num_steps: int) -> int:
        return 1

    def replicas(self, num_steps: int) -> int:
        # A sample costs up to three times as much as a plain one.
        return -(-num_steps // 4)


@dataclasses.dataclass(frozen=True)
class Sobol(AbstractOfOneReplica):
    """By quasi-random points along the leading axes, scrambled anew for each chunk."""

    name = "sobol"
    lead: Lead

    def chunks(self, program: Program, num_steps: int) -> int:
        return min(RANDOMISATIONS, num_steps)

    def samples(self, run: Run, draws: Sequence[Draws]) -> Iterator[tuple[np.ndarray, ...]]:
        for mine in draws:  # Each has points of its own.
            yield from super().samples(run, [mine])

    def points(self, run: Run, draws: Draws) -> Float[np.ndarray, "samples axes"]:
        seed = (*(int(word) for word in np.asarray(run.key)), draws.first)
        number, room = num_axes(run.program), len(self.lead.direction)
        return sobol_scores(number, room, draws.steps, seed, run.plan.dtype)

    def merged(self, laws: list[Law]) -> Law:
        return merge_randomisations(laws)

    def compacted(self, laws: list[Law]) -> list[Law]:
        return laws


@dataclasses.dataclass(frozen=True)
class Explicit(AbstractSampling):
    """All replicas of each step, by their law. The latest end of each sink represents them, as if a
    step had a single replica.

    **Attributes:**

    - `allocations`: on how many sets of GPUs the steps run, each chunk on its own; by default,
        each step has its own GPUs.
    """

    name = "plain"
    allocations: int | None = None

    def chunks(self, program: Program, num_steps: int) -> int:
        return self.allocations or Plain().chunks(program, num_steps)

    def num_replicas(self, program: Program) -> int:
        return 1

    def merged(self, laws: list[Law]) -> Law:
        return merge_chunks(laws) if self.allocations is None else merge_allocations(laws)

    def compacted(self, laws: list[Law]) -> list[Law]:
        return super().compacted(laws) if self.allocations is None else laws

    def samples(self, run: Run, draws: Sequence[Draws]) -> Iterator[tuple[np.ndarray, ...]]:
        regime, first = run.chances.regime, draws[0].first
        first_of = np.array([np.argmax(regime == g) for g in range(regime.max() + 1)], np.int32)
        numbers = np.array([mine.number for mine in draws])
        ends = np.cumsum([mine.steps for mine in draws])

        def on_gpus(row):
            if self.allocations is None:
                return first + row, first + row
            return first + row, numbers[np.searchsorted(ends, row, side="right")]

        begin = 0
        for latest, regimes in slowest_ends(run, int(ends[-1]), on_gpus):
            done = 0
            for k, start, last in parts(ends, begin, len(latest)):
                mine, of_regime = (x[done : done + last - start] for x in (latest, regimes))
                ids = np.arange(draws[k].first + start, draws[k].first + last, dtype=np.uint32)
                ones = np.ones(len(ids), np.float32)
                yield ids, mine, mine.max(axis=1), first_of[of_regime], ones
                done += len(ids)
            begin += done


def slowest_ends(
    run: Run, num_steps: int, on_gpus: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The latest end of each sink among all replicas of steps, `(steps, sinks)`, and the regimes of
    these, some steps at a time.

    **Arguments:**

    - `on_gpus`: gives, for the numbers of some steps, the ids of their draws, and the ids of the
        sets of GPUs that they run on.
    """
    replicas, sinks = run.program.num_replicas, run.program.sinks.number

    def inputs(begin, count):
        step, replica = np.divmod(np.arange(begin, begin + count), replicas)
        return tuple((x * replicas + replica).astype(np.uint32) for x in on_gpus(step))

    rest = np.zeros((0, sinks), run.plan.dtype), np.zeros(0, np.int32)
    shared, size = (without_steps(run.plan), run.key), tiles_of(run.plan)
    for batch in tiles(_explicit_tile, shared, num_steps * replicas, inputs, per_batch=size):
        ends, regimes = batch.samples()
        ends = np.concatenate([rest[0], ends[:, :sinks]])
        regimes = np.concatenate([rest[1], regimes])
        steps = len(ends) // replicas
        whole = steps * replicas
        rest = ends[whole:], regimes[whole:]
        if steps:
            yield ends[:whole].reshape(steps, replicas, -1).max(axis=1), regimes[:whole:replicas]


def _explicit_tile(shared, _, ids, gpu_ids):
    """One tile: ends `(samples, sinks)`, and the regime of each sample's step."""
    plan, key = shared
    regimes, _ = regimes_and_stalls(plan.structure.strata, ids // plan.structure.num_replicas)
    stalls = poisson_stalls(plan, ids, key)
    ends = replica_ends(plan, Sampled(ids, regimes, stalls, gpu_ids=gpu_ids), key)
    return ends.T, regimes


def named(name: str, run: Run) -> AbstractSampling:
    """The sampling of a name, with the leading axes of a run: `"plain"`, `"importance"` or
    `"sobol"`.
    """
    if name == Plain.name:
        return Plain()
    kind = {one.name: one for one in (Importance, Sobol)}[name]
    shifted = kind is Importance
    return kind(leading_axes(run.program, run.plan, pilot_key(), importance=shifted))
