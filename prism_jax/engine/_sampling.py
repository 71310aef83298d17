"""How the samples of a run are drawn."""

import abc
import dataclasses
import itertools as it
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..law import Law, merge_chunks
from ..program import Program
from ..random import KeyData
from ..replica import (
    TILE,
    Batch,
    Lead,
    Plan,
    leading_axes,
    led,
    mean_reductions,
    replica_ends,
    stratum_of,
    tiles,
    tiles_of,
    without_steps,
)


_MOST_LAWS = 16
# The pilots that find the leading axes always use this key, so that results of other keys can be
# merged.
_PILOT_SEED = 0


def pilot_key() -> jax.Array:
    return jax.random.key(_PILOT_SEED)


class Draws(NamedTuple):
    """Which samples are drawn for one chunk of a run.

    **Attributes:**

    - `first`, `steps`: the first step of the chunk, and its number of steps.
    - `replicas`: the number of samples, whose ids begin at the first step.
    """

    first: int
    steps: int
    replicas: int


def by_chunk(
    draws: Sequence[Draws], samples: Iterable[tuple[np.ndarray, ...]]
) -> Iterator[tuple[np.ndarray, ...]]:
    """The samples of chunks, at most one chunk at a time."""
    ends, start = np.cumsum([chunk.replicas for chunk in draws]), 0
    for columns in samples:
        stop = start + len(columns[0])
        within = ends[(start < ends) & (ends < stop)].tolist()
        for begin, end in it.pairwise([start, *within, stop]):
            yield tuple(x[begin - start : end - start] for x in columns) if within else columns
        start = stop


class AbstractSampling(abc.ABC):
    """How replica samples are drawn: in chunks, which are independent. The law is that of the
    steps of all.
    """

    name: ClassVar[str]  # For users, and in files of laws.
    lead: Lead | None = None  # The leading axes, if samples are not drawn by their law alone.

    @abc.abstractmethod
    def samples(
        self, plan: Plan, key: KeyData, draws: Sequence[Draws]
    ) -> Iterator[tuple[np.ndarray, ...]]:
        """The samples of chunks, one after the other and some at a time: ends `(n, sinks)` or with
        room for more sinks, scores, strata and likelihoods.
        """

    def replicas(self, num_steps: int) -> int:
        """How many samples are drawn for so many steps."""
        return num_steps

    def merged(self, laws: list[Law]) -> Law:
        """The law of all chunks from the law of each."""
        return merge_chunks(laws)

    def compacted(self, laws: list[Law]) -> list[Law]:
        """The same laws, or fewer of more chunks, so that memory stays flat."""
        return [merge_chunks(laws)] if len(laws) == _MOST_LAWS else laws


class AbstractOfOneReplica(AbstractSampling):
    """Draws samples of one replica."""

    def samples(
        self, plan: Plan, key: KeyData, draws: Sequence[Draws]
    ) -> Iterator[tuple[np.ndarray, ...]]:
        # Chunks stand one after the other and share tiles, for some are short.
        first_ids, numbers = np.array([(chunk.first, chunk.replicas) for chunk in draws]).T
        ends = np.cumsum(numbers)
        to_ids = (first_ids - (ends - numbers)).astype(np.uint32)

        def inputs(first, count):
            of_chunks = np.diff(np.clip(ends, first, first + count), prepend=first)
            places = np.arange(first, first + count, dtype=np.uint32)
            return (places + np.repeat(to_ids, of_chunks),)

        shared, size = (without_steps(plan), self.lead, key), tiles_of(plan)
        for batch in tiles(_replica_tile, shared, int(ends[-1]), inputs, per_batch=size):
            yield batch.kept()


def _replica_tile(shared, _, ids):
    """One tile: ends `(samples, sinks)`, score, stratum and likelihood."""
    plan, lead, key = shared
    sampled, likelihood = led(plan, lead, ids, key)
    ends = replica_ends(plan, sampled, key)
    score = jnp.max(ends + mean_reductions(plan)[:, sampled.regimes], axis=0)
    return ends.T, score, stratum_of(plan.structure.strata, ids), likelihood


def plain_samples(plan: Plan, number: int, key: KeyData, draws: Draws) -> Iterator[Batch]:
    """The plain samples of one chunk, for each of a number of tables that are the first axis of
    those of a plan: as `samples` gives them, with the tables as their second axis. Random numbers
    are drawn once for all.
    """

    def inputs(first: int, count: int) -> tuple[np.ndarray, ...]:
        return (np.arange(draws.first + first, draws.first + first + count, dtype=np.uint32),)

    shared, size = (without_steps(plan), key), TILE // number
    per_batch = tiles_of(plan)
    return tiles(_tile_of_plans, shared, draws.replicas, inputs, per_batch=per_batch, size=size)


def _tile_of_plans(shared, _, ids):
    """One tile of `_replica_tile` for each of several tables: the second axis."""
    plan, key = shared

    def of_tables(tables):
        return _replica_tile((dataclasses.replace(plan, tables=tables), None, key), None, ids)

    return jax.vmap(of_tables, out_axes=1)(plan.tables)


@dataclasses.dataclass(frozen=True)
class Plain(AbstractOfOneReplica):
    """By their law."""

    name = "plain"


@dataclasses.dataclass(frozen=True)
class Importance(AbstractOfOneReplica):
    """Half of them slower than their law, and weighted."""

    name = "importance"
    lead: Lead

    def replicas(self, num_steps: int) -> int:
        # A sample costs up to three times as much as a plain one.
        return -(-num_steps // 4)


def sampling_named(name: str, program: Program, plan: Plan) -> AbstractSampling:
    """The sampling of a name, `"plain"` or `"importance"`, with the leading axes of a program."""
    if name == Plain.name:
        return Plain()
    return Importance(leading_axes(program, plan, pilot_key()))
