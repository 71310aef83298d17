"""How the samples of a run are drawn."""

import abc
import dataclasses
from collections.abc import Iterator, Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from ..law import Law, merge_chunks
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
from ._run import Draws, Run


_MOST_LAWS = 16
# The pilots that find the leading axes always use this key, so that results of other keys can be
# merged.
_PILOT_SEED = 0


def pilot_key() -> jax.Array:
    return jax.random.key(_PILOT_SEED)


class AbstractSampling(abc.ABC):
    """How replica samples are drawn: in chunks, which are independent. The law is that of the
    steps of all.
    """

    name: ClassVar[str]  # For users, and in files of laws.
    lead: Lead | None = None  # The leading axes, if samples are not drawn by their law alone.

    @abc.abstractmethod
    def samples(self, run: Run, draws: Sequence[Draws]) -> Iterator[tuple[np.ndarray, ...]]:
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

    def samples(self, run: Run, draws: Sequence[Draws]) -> Iterator[tuple[np.ndarray, ...]]:
        # Chunks stand one after the other and share tiles, for some are short.
        first_ids, numbers = np.array([(chunk.first, chunk.replicas) for chunk in draws]).T
        ends = np.cumsum(numbers)
        to_ids = (first_ids - (ends - numbers)).astype(np.uint32)

        def inputs(first, count):
            of_chunks = np.diff(np.clip(ends, first, first + count), prepend=first)
            places = np.arange(first, first + count, dtype=np.uint32)
            return (places + np.repeat(to_ids, of_chunks),)

        shared, size = (without_steps(run.plan), self.lead, run.key), tiles_of(run.plan)
        for batch in tiles(_replica_tile, shared, int(ends[-1]), inputs, per_batch=size):
            yield batch.kept()


def _replica_tile(shared, _, ids):
    """One tile: ends `(samples, sinks)`, score, stratum and likelihood."""
    plan, lead, key = shared
    sampled, likelihood = led(plan, lead, ids, key)
    ends = replica_ends(plan, sampled, key)
    score = jnp.max(ends + mean_reductions(plan)[:, sampled.regimes], axis=0)
    return ends.T, score, stratum_of(plan.structure.strata, ids), likelihood


def plan_of_runs(runs: Sequence[Run]) -> Plan:
    """The plan of the ops of runs that differ in their tables only: these have the runs as their
    first axis.
    """
    tables = jax.tree.map(
        lambda *x: np.stack([np.asarray(of_run) for of_run in x]),
        *[run.plan.tables for run in runs],
    )
    return without_steps(dataclasses.replace(runs[0].plan, tables=jax.device_put(tables)))


def plain_samples(runs: Sequence[Run], draws: Draws) -> Iterator[Batch]:
    """The plain samples of one chunk for each of some runs, which differ in their tables only: as
    `samples` gives them, with the runs as their second axis. Random numbers are drawn once for all.
    """
    plan = plan_of_runs(runs)

    def inputs(first: int, count: int) -> tuple[np.ndarray, ...]:
        return (np.arange(draws.first + first, draws.first + first + count, dtype=np.uint32),)

    size, per_batch = TILE // len(runs), tiles_of(plan)
    shared = plan, runs[0].key
    return tiles(_tile_of_runs, shared, draws.replicas, inputs, per_batch=per_batch, size=size)


def _tile_of_runs(shared, _, ids):
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


def sampling_named(name: str, run: Run) -> AbstractSampling:
    """The sampling of a name, `"plain"` or `"importance"`, with the leading axes of a run."""
    if name == Plain.name:
        return Plain()
    return Importance(leading_axes(run.program, run.plan, pilot_key()))
