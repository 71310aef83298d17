"""GPUs whose factors are known, in their places, and steps on them: each replica by itself."""

import dataclasses
import functools as ft
import operator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from ..engine import Run, check_num_samples, prepare
from ..program import Program
from ..replica import (
    Sampled,
    poisson_stalls,
    replica_ends,
    tile_size,
    tiles,
    tiles_of,
    without_graph,
)
from ..step import step_parts


# An irrational stride, which distributes regimes evenly over any range of steps.
_SILVER = np.sqrt(2) - 1


@dataclasses.dataclass(frozen=True)
class Nodes:
    """Nodes of known GPUs, and the places that they can take in a job.

    GPUs are numbered as in Megatron-LM: those of a tensor- and context-parallel group are
    neighbours, then come the replicas, then the pipeline ranks. A place is as many neighbours as a
    node has GPUs.

    **Attributes:**

    - `factors`: of each GPU of each node, relative to the mean GPU.
    - `num_replicas`, `num_ranks`: of the job.
    """

    factors: Float[np.ndarray, "nodes devices"]
    num_replicas: int
    num_ranks: int

    def slowest(
        self, order: Int[np.ndarray, " nodes"]
    ) -> tuple[Float[np.ndarray, "replicas ranks"], Int[np.ndarray, " replicas"]]:
        """With the node `order[i]` in place `i`: the factor of the slowest GPU of each pipeline
        rank of each replica, and which GPU is the slowest of each replica.
        """
        gpus = np.arange(self.factors.size).reshape(self.factors.shape)[order].reshape(-1)
        gpus = gpus.reshape(self.num_ranks, self.num_replicas, -1).swapaxes(0, 1)
        factors = self.factors.reshape(-1)[gpus]
        flat = factors.reshape(self.num_replicas, -1)
        leader = gpus.reshape(flat.shape)[np.arange(len(flat)), flat.argmax(axis=1)]
        return factors.max(axis=2), leader

    @ft.cached_property
    def pieces(self) -> Float[np.ndarray, "nodes pieces"]:
        """The slowest GPU of each piece of a node that is a replica's rank, or lies within one."""
        return self.factors.reshape(len(self.factors), self._num_pieces, -1).max(axis=2)

    @ft.cached_property
    def places(self) -> Int[np.ndarray, "nodes pieces"]:
        """For each piece of each place its `replica * num_ranks + rank`."""
        step = self.factors.shape[1] // self._num_pieces
        first = np.arange(0, self.factors.size, step).reshape(len(self.factors), -1)
        rank, replica = np.divmod(first // self._group, self.num_replicas)
        return replica * self.num_ranks + rank

    @property
    def _group(self) -> int:
        return self.factors.size // (self.num_replicas * self.num_ranks)

    @property
    def _num_pieces(self) -> int:
        devices = self.factors.shape[1]
        return devices // self._group if devices % self._group == 0 else 1

    def least(self) -> Float[np.ndarray, " ranks_of_replicas"]:
        """For each k, the least that the k-th slowest of all ranks of all replicas can be."""
        if self.factors.shape[1] % self._group == 0:
            return -np.sort(-self.pieces.reshape(-1))
        # The k slowest before it hold no more than so many GPUs.
        return -np.sort(-self.factors.reshape(-1))[:: self._group]


def nodes_of(program: Program, factors: np.ndarray, devices_per_node: int) -> Nodes:
    """The nodes of a program.

    **Arguments:**

    - `factors`: of each GPU, or of each node, in their present order.
    - `devices_per_node`: GPUs of a node.

    **Raises:**

    `ValueError` unless all factors are positive, and there are as many as the program has GPUs or
    nodes.
    """
    try:
        devices_per_node = operator.index(devices_per_node)
        factors = np.asarray(factors, float)
    except (TypeError, ValueError):
        raise ValueError(
            "`devices_per_node` must be a whole number, and factors numbers."
        ) from None
    world = program.group_size * program.num_replicas * program.num_ranks
    if devices_per_node < 1 or world % devices_per_node or world == devices_per_node:
        raise ValueError(
            f"To place something, several nodes of {devices_per_node} must be full, and the number "
            f"of the job's GPUs is {world}."
        )
    number = world // devices_per_node
    if factors.shape not in ((world,), (number,)):
        raise ValueError(
            f"The number of factors is {factors.size}, and the job fills {number} x "
            f"{devices_per_node} GPUs, so give {number} or {world}."
        )
    # Of what is beyond, sums and ratios are not finite.
    if not ((factors >= 1e-6) & (factors <= 1e6)).all():
        raise ValueError(
            "Every factor must be a positive number from 1e-6 to 1e6: a latency over that of the "
            "mean GPU."
        )
    of_gpus = np.broadcast_to(factors.reshape(number, -1), (number, devices_per_node))
    return Nodes(of_gpus / of_gpus.mean(), program.num_replicas, program.num_ranks)


@dataclasses.dataclass(frozen=True)
class Placed:
    """What some steps have in common, whatever GPUs their replicas run on.

    **Attributes:**

    - `run`: the simulation.
    - `regimes`: `(steps,)`, of the network.
    - `factor`, `tail`: `(steps,)`; a step takes `factor * slowest + tail` seconds, where `slowest`
        is the latest of its replicas. The tail has the factor already.
    """

    run: Run
    regimes: Int[np.ndarray, " steps"]
    factor: Float[np.ndarray, " steps"]
    tail: Float[np.ndarray, " steps"]

    @property
    def num_steps(self) -> int:
        return len(self.factor)

    def times(self, slowest: Float[np.ndarray, " steps"]) -> Float[np.ndarray, " steps"]:
        """The step times, in seconds."""
        return self.factor * slowest + self.tail


def placed(program: Program, *, num_samples: int, key: "jax.Array") -> Placed:
    """Draws what steps have in common."""
    num_samples = check_num_samples(num_samples)
    run = prepare(program, key)
    # Each of the regimes in its share of any run of steps.
    place = np.modf(np.arange(num_samples) * _SILVER)[0]
    regimes = np.searchsorted(np.cumsum(run.chances.network)[:-1], place, "right").astype(np.int32)

    def inputs(first, count):
        return (regimes[first : first + count],)

    last = _all(run, _last_tile, (without_graph(run.plan), run.key), num_samples, inputs)
    return Placed(run, regimes, *last.T.astype(np.float64))


def replicas_ready(
    steps: Placed, slowest: Float[np.ndarray, "n ranks"], noise: Int[np.ndarray, " n"]
) -> Float[np.ndarray, "n steps"]:
    """When some replicas have reduced their gradients, in each step.

    **Arguments:**

    - `steps`: from `placed`.
    - `slowest`: of each replica, the factor of the slowest GPU of each pipeline rank, relative to
        the mean one.
    - `noise`: of each replica, which random numbers are its own: below `2**32 / num_steps`.

    **Returns:**

    Seconds, before the factor of the step.
    """
    number = steps.num_steps
    ends = _all_of(
        steps, _ready_tile, slowest, noise, len(noise) * number, lambda i: divmod(i, number)
    )
    return ends.reshape(-1, number)


def ready_slopes(
    steps: Placed,
    slowest: Float[np.ndarray, "n ranks"],
    noise: Int[np.ndarray, " n"],
    step: Int[np.ndarray, " n"],
) -> Float[np.ndarray, "n ranks"]:
    """The derivative of what `replicas_ready` gives for each replica, in one step each, with
    respect to `slowest`, in seconds.
    """
    slopes = _all_of(steps, _slope_tile, slowest, noise, len(noise), lambda i: (i, step[i]))
    return slopes[:, : steps.run.program.num_ranks]


def _all_of(steps: Placed, function, slowest, noise, number: int, which) -> np.ndarray:
    """All that a function gives for so many samples: `which` gives the replica and the step of
    each.
    """
    plan, key = steps.run.plan, steps.run.key
    room = np.ones((len(slowest), plan.structure.ranks - slowest.shape[1]))
    rows = np.concatenate([slowest, room], axis=1).astype(plan.dtype)

    def inputs(first, count):
        row, step = which(np.arange(first, first + count))
        row_noise = noise[row].astype(np.uint32)
        return rows[row], row_noise, step.astype(np.uint32), steps.regimes[step]

    return _all(steps.run, function, (plan, key, np.uint32(steps.num_steps)), number, inputs)


def _all(run: Run, function, shared, number: int, inputs) -> np.ndarray:
    """All that a function gives for so many samples."""
    options = {"per_batch": tiles_of(run.plan), "size": tile_size(number)}
    batches = tiles(function, shared, number, inputs, **options)
    return np.concatenate([batch.samples() for batch in batches])


def _last_tile(shared, ids, regimes):
    plan, key = shared
    ends = jnp.zeros((len(plan.structure.sinks.first), len(ids)), plan.dtype)
    _, parts = step_parts(plan, ends, ids, key, regimes)
    return jnp.stack([parts.factor, parts.factor * parts.tail], axis=1)


def _ready_tile(shared, _, slowest, noise, step, regimes):
    plan, key, number = shared
    ids = noise * number + step
    stalls = poisson_stalls(plan, ids, key)
    ends = replica_ends(plan, Sampled(ids, regimes, stalls, slowest=slowest.T), key)
    return step_parts(plan, ends, step, key, regimes)[1].barrier


def _slope_tile(shared, _, slowest, *inputs):
    return jax.grad(lambda slowest: jnp.sum(_ready_tile(shared, None, slowest, *inputs)))(slowest)
