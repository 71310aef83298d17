"""The program: everything that the engine needs of a training step."""

import equinox as eqx
import numpy as np
from jaxtyping import Bool, Int

from .._misc import FrozenArray
from .._summary import Summary
from ..maxplus import Levels
from ..schedule import SEND_RECV
from ._adjustment import Adjustment
from ._collapse import Blocks
from ._loaded import ExpertLoads
from ._table import LatencyTable
from ._variability import Variability


class Ops(eqx.Module):
    """What each op of the graph is. Static; one entry per op.

    **Attributes:**

    - `phase`: `F`, `B`, `I`, `W`, `FB` (an overlapped pair), or `SR` (send_recv).
    - `stage`: its (global virtual) stage; of a send_recv, the one that sends.
    - `microbatch`.
    - `rank`: the pipeline rank it runs on; of a send_recv, the one that sends.
    - `row`: its entry of `Rows`.
    """

    phase: FrozenArray = eqx.field(static=True)
    stage: FrozenArray = eqx.field(static=True)
    microbatch: FrozenArray = eqx.field(static=True)
    rank: FrozenArray = eqx.field(static=True)
    row: FrozenArray = eqx.field(static=True)

    @property
    def is_send_recv(self) -> Bool[np.ndarray, " ops"]:
        """Whether an op is a send_recv; the others compute."""
        return self.phase.value == SEND_RECV


class Rows(eqx.Module):
    """The pairs (class of op, rank) that occur: all that decides an op's law. Static.

    **Attributes:**

    - `class_`: which class of `Blocks`.
    - `rank`: the pipeline rank whose slowest GPU slows it, or -1 for communication.
    """

    class_: FrozenArray = eqx.field(static=True)
    rank: FrozenArray = eqx.field(static=True)


class Sinks(eqx.Module):
    """What the replicas reduce together, and when. Static; one entry per sink of `levels`, those of
    a pipeline rank one after the other in order of time, its end the last.

    **Attributes:**

    - `rank`: the pipeline rank, which runs its reductions one after the other.
    - `reduction`: the class of the collectives that may start when the sink has ended, or -1.
    - `contention`: what part of its own latency a reduction adds to the compute beside it.
    """

    rank: FrozenArray = eqx.field(static=True)
    reduction: FrozenArray = eqx.field(static=True)
    contention: float = eqx.field(static=True)

    @property
    def number(self) -> int:
        return len(self.rank.value)

    @property
    def last(self) -> Int[np.ndarray, " ranks"]:
        """The sink of each rank that is its end."""
        return np.flatnonzero(np.diff(self.rank.value, append=-1))


class Stratum(eqx.Module):
    """One part of the replica samples: the network's regime and the number of stalls are set, and
    the weights of the samples make up for it. Static.

    **Attributes:**

    - `regime`: 0 for a calm network, 1 for a congested one.
    - `stalls`: how many stalls the replica has.
    - `share`: the share of the samples that the stratum gets.
    """

    regime: int = eqx.field(static=True)
    stalls: int = eqx.field(static=True)
    share: float = eqx.field(static=True)


class Program(eqx.Module):
    """One training step, compiled: a max-plus graph of ops and the laws of their latencies.

    The arrays among `latencies` and `variability` are its parameters: derivatives are taken with
    respect to them, and new values never recompile. All else is static.

    **Attributes:**

    - `latencies`: mean and law of every kernel.
    - `variability`: the factors that ops share, and stalls.
    - `levels`: the graph of one replica of the pipeline.
    - `ops`, `rows`, `blocks`: what the ops are, and which kernels they are made of.
    - `sequences`: the kernels of each class in order, and where members wait, for `"kernel"`.
    - `sinks`: the reductions of gradients over the replicas, and what they wait for.
    - `tail`: the class of what follows when all ranks have met, or -1.
    - `stall_ops`, `stall_kinds`, `stall_counts`: which ops may stall: op, position of the kernel's
        kind in `sorted(variability.stalls)`, and calls times members.
    - `strata`: how the replica samples are divided.
    - `num_replicas`: the copies of the pipeline that meet at the end of a step only.
    - `group_size`: GPUs of each pipeline rank of one of them.
    - `world_size`: GPUs of the job.
    - `resolution`: `"block"`, or `"kernel"` to draw every kernel of every member.
    - `adjustment`: further factors on ops, also parameters; `None` for none.
    - `loads`: of the members of expert-parallel groups; `None` where they are equal.
    """

    latencies: LatencyTable
    variability: Variability
    levels: Levels
    ops: Ops
    rows: Rows
    blocks: Blocks
    sequences: tuple[FrozenArray, ...] = eqx.field(static=True)
    sinks: Sinks
    tail: int = eqx.field(static=True)
    stall_ops: FrozenArray = eqx.field(static=True)
    stall_kinds: FrozenArray = eqx.field(static=True)
    stall_counts: FrozenArray = eqx.field(static=True)
    strata: tuple[Stratum, ...] = eqx.field(static=True)
    num_replicas: int = eqx.field(static=True)
    group_size: int = eqx.field(static=True)
    world_size: int = eqx.field(static=True)
    resolution: str = eqx.field(static=True)
    adjustment: Adjustment | None = None
    loads: ExpertLoads | None = None

    def __repr__(self) -> str:
        return self._summary().text()

    def _repr_html_(self) -> str:
        return self._summary().html()

    def _summary(self) -> Summary:
        laws = self.variability
        shared = ("rank", "step", "worker_step", "microbatch", "network")
        rows = [
            ("ops of a replica", self.num_ops),
            ("pipeline ranks", self.num_ranks),
            ("microbatches", self.num_microbatches),
            ("replicas", self.num_replicas),
            ("GPUs of a rank", self.group_size),
            ("GPUs", self.world_size),
            ("kinds of kernels", ", ".join(self.latencies.kinds)),
            ("shared factors", ", ".join(n for n in shared if getattr(laws, n) is not None)),
            ("stalls", ", ".join(sorted(laws.stalls)) or "none"),
            ("resolution", self.resolution),
        ]
        return Summary("Program of a training step", rows)

    @property
    def num_ops(self) -> int:
        return self.levels.num_ops

    @property
    def num_ranks(self) -> int:
        return int(self.sinks.rank.value[-1]) + 1

    @property
    def num_microbatches(self) -> int:
        return int(self.ops.microbatch.value.max(initial=0)) + 1


def stall_rate(program: Program) -> float:
    """Expected stalls in one replica's step."""
    stalls = program.variability.stalls
    rates = np.array([float(stalls[kind].rate) for kind in sorted(stalls)])
    return float(rates[program.stall_kinds.value] @ program.stall_counts.value)
