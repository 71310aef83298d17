"""The latencies of a graph's ops: made where they are needed, and made again rather than kept."""

import abc
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
from jaxtyping import Array, Int


class AbstractOpLaw(eqx.Module):
    """The law of an op's latency, whose fields are arrays `(lanes, samples)`: elementwise."""

    @abc.abstractmethod
    def latency(self, op: Any, z: Any, common: Any) -> Any:
        """The latency in seconds, not negative.

        **Arguments:**

        - `op`: which op, `(lanes, 1)` or `(lanes, samples)`.
        - `z`: its noise, a standard normal, `(lanes, samples)`.
        - `common`: what all ops share.
        """


class Latencies(eqx.Module):
    """How the latency of an op comes about, where it is needed and from little memory.

    An op's latency is a function of one row of each table, of what all ops share, and of noise of
    its own, which is made again rather than kept.

    **Attributes:**

    - `tables`: a law of arrays `(rows, samples)`, or `(rows, 1)` where samples do not differ.
    - `rows`: for each table, which row an op reads: `(levels, width)`; any row for padding.
    - `common`: a PyTree of arrays `(1, samples)`, and of tables of several rows.
    - `noise`: `(noise_arguments, pair, arranged) -> arranged(first, second)`: the noise of the
        first and of the second lane of each pair, whose numbers are `(pairs, 1)` or `(1, samples)`;
        `arranged` puts both in the lanes' order, or takes one of them for each sample.
    - `noise_arguments`: a PyTree of arrays `(samples,)`, or of numbers for all samples. Not
        differentiated.
    """

    tables: AbstractOpLaw | None
    rows: AbstractOpLaw
    common: Any
    noise: Callable[..., Any] = eqx.field(static=True)
    noise_arguments: Any

    def rows_of(self, level: Int[Array, "*levels"]) -> AbstractOpLaw:
        """The row of each table that the lanes of a level read, or of some levels."""
        return jax.tree.map(lambda row: row[level], self.rows)
