"""Which GPUs of which nodes make up each pipeline rank of each replica."""

import dataclasses
import functools as ft
import operator

import numpy as np
from jaxtyping import Float, Int

from ..program import Program


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
            f"The job's {world} GPUs must fill several nodes of {devices_per_node} for there to be "
            "something to place."
        )
    number = world // devices_per_node
    if factors.shape not in ((world,), (number,)):
        raise ValueError(
            f"{factors.size} factors were given; the job has {number} nodes of {devices_per_node}, "
            f"so give {number} or {world}."
        )
    # Of what is beyond, sums and ratios are not finite.
    if not ((factors >= 1e-6) & (factors <= 1e6)).all():
        raise ValueError(
            "Every factor must be a positive number from 1e-6 to 1e6: a latency over that of the "
            "mean GPU."
        )
    of_gpus = np.broadcast_to(factors.reshape(number, -1), (number, devices_per_node))
    return Nodes(of_gpus / of_gpus.mean(), program.num_replicas, program.num_ranks)
