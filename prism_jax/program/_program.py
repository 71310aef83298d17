"""The program: everything that the engine needs of a training step.

It is written to be read: arrays have as many entries as there are ops. Its parameters are arrays
of JAX; whole numbers are arrays of NumPy, by which nothing is differentiated, and other constants
are numbers of Python. A gradient is a program, too, with `None` for all but the parameters.
Compiled functions take the same as a `replica.Plan`, whose arrays are padded and are arguments, so
that a second graph of a bucket compiles nothing.
"""

import dataclasses
import hashlib
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, UInt32

from .._padding import AnyArray, bucket
from .._summary import Shown, Table
from ..loads import Loads
from ..maxplus import Levels
from ..schedule import SEND_RECV
from ._blocks import Blocks
from ._variability import Variability


class LatencyTable(eqx.Module):
    """The mean latency of each kernel. The law around it has mean one and depends on the kind only.

    Means and spreads are separate parameters: a derivative with respect to one keeps the other
    fixed.

    **Attributes:**

    - `mean`: the mean latencies, in seconds.
    - `kinds`, `kind`, `sizes`: kernel `k` is `kinds[kind[k]]` at `sizes[k]`. Static.
    - `on_network`: whether the network's regime applies to a kernel.
    - `loading`: for a kernel that is an op by itself, how strongly the factor `f` of its
        microbatch's data acts on it: it takes `1 + loading (f - 1)` times as long, but never a
        negative time. On the compute of other ops, and on all compute if `loading` is `None`, the
        factor acts in full.
    """

    mean: Float[Array, "... kernels"]
    kinds: tuple[str, ...] = eqx.field(static=True, default=())
    kind: tuple[int, ...] = eqx.field(static=True, default=())
    sizes: tuple[str, ...] = eqx.field(static=True, default=())
    on_network: Bool[AnyArray, " kernels"] | None = None
    loading: Float[Array, "... kernels"] | None = eqx.field(metadata={"fill": 1}, default=None)


class Adjustment(eqx.Module):
    """Factors on groups of ops. All are parameters. A factor of one changes nothing.

    **Attributes:**

    - `group`: the group of each op; `None` in a gradient, and in a plan, which has it by lanes.
    - `latency`: a factor on the latency of the ops of each group. It does not act on stalls.
    - `spread`: a factor on the deviation of each op from its mean by its own noise. For kernels
        with a log-normal law it multiplies `sigma`.
    - `gpu`: for each pipeline rank, a factor on the deviation from one of the factor of its slowest
        GPU.
    """

    group: Int[AnyArray, " ops"] | None
    latency: Float[Array, "... groups"] = eqx.field(metadata={"fill": 1})
    spread: Float[Array, "... groups"] = eqx.field(metadata={"fill": 1})
    gpu: Float[Array, "... ranks"] = eqx.field(metadata={"fill": 1})


class Ops(eqx.Module):
    """Describes each op of the graph, with one entry per op. Those of a plan are in the order of
    their cells (`Levels`), and have no phases.

    **Attributes:**

    - `phase`: `F` (forward), `B` (backward), `I` (backward-input), `W` (backward-weight), `FB` (an
        overlapped pair), or `SR` (send_recv). Static.
    - `stage`: the (global virtual) stage of the op; for a send_recv, the stage that sends.
    - `microbatch`: the microbatch of the op; in a plan, -1 where its data make no difference.
    - `rank`: the pipeline rank that the op runs on; for a send_recv, the rank that sends.
    - `row`: the entry of `Rows` that the op belongs to.
    - `group`: the group of the program's adjustment; of a plan.
    - `load`: which loads the op has: those of its stage and microbatch, or -1 for none; of a plan,
        where loads are unequal.
    """

    phase: tuple[str, ...] = eqx.field(static=True)
    stage: Int[AnyArray, " ops"]
    microbatch: Int[AnyArray, " ops"]
    rank: Int[AnyArray, " ops"]
    row: Int[AnyArray, " ops"]
    group: Int[AnyArray, " ops"] | None = None
    load: Int[AnyArray, " ops"] | None = None

    @property
    def is_send_recv(self) -> Bool[np.ndarray, " ops"]:
        """Whether each op is a send_recv; all other ops compute."""
        return np.array(self.phase) == SEND_RECV


class Rows(eqx.Module):
    """The pairs (class of op, rank) that occur. The pair decides the law of an op.

    **Attributes:**

    - `class_`: the class of the op in `Blocks`.
    - `rank`: the pipeline rank whose slowest GPU the op waits for, or -1 for communication.
    """

    class_: Int[AnyArray, " rows"]
    rank: Int[AnyArray, " rows"]


class Sinks(eqx.Module):
    """The reductions over replicas, and when they may start, with one entry per sink of `levels`.
    The sinks of a pipeline rank are consecutive, in order of time; the last is the end of the rank.
    If nothing is reduced, a single sink is the end of all ranks where these are more than 16.

    **Attributes:**

    - `rank`: the pipeline rank, which runs its reductions one after the other; or -1 for all.
    - `reduction`: the class of the collectives that may start when the sink has ended, or -1.
    - `first`: the first sink of the same rank.
    - `is_last`: whether a sink is the last of its rank.
    - `contention`: the part of its own latency that a reduction adds to the compute that it
        overlaps.
    - `number`: how many sinks there are.
    """

    rank: Int[AnyArray, " sinks"]
    reduction: Int[AnyArray, " sinks"] = eqx.field(metadata={"fill": -1})
    first: Int[AnyArray, " sinks"]
    is_last: Bool[AnyArray, " sinks"] = eqx.field(metadata={"fill": True})
    contention: float | Float[AnyArray, ""]
    number: int | UInt32[AnyArray, ""]


class Stratum(eqx.Module):
    """One part of the replica samples, in which the network's regime and the number of stalls are
    fixed. The weights of the samples correct for this. Static.

    **Attributes:**

    - `regime`: 0 for a calm network, 1 for a congested one.
    - `stalls`: how many stalls the replica has.
    - `share`: the share of the samples that are in the stratum.
    """

    regime: int = eqx.field(static=True)
    stalls: int = eqx.field(static=True)
    share: float = eqx.field(static=True)


class Program(Shown, eqx.Module):
    """A compiled training step: a max-plus graph of ops and the laws of their latencies.

    The arrays of JAX in `latencies`, `variability`, `adjustment` and `loads` are its parameters,
    which `eqx.is_inexact_array` tells from the rest. Derivatives are taken with respect to them,
    and new values do not cause recompilation. Static are the numbers of ops, ranks, microbatches,
    replicas and GPUs, the strata, and names.

    **Attributes:**

    - `latencies`: the mean latency of every kernel.
    - `variability`: the laws around the means: of each kind of kernel, of the factors that ops
        share, and of stalls.
    - `levels`: the graph of one replica of the pipeline.
    - `ops`, `rows`, `blocks`: what the ops are, and which kernels they consist of.
    - `sinks`: the gradient reductions over the replicas, and the ops that they wait for.
    - `tail`: the class of the block that runs after all ranks have met, or -1.
    - `stall_ops`, `stall_kinds`, `stall_counts`: the ops that may stall: for each, its number, the
        position of its kind of kernel in `sorted(variability.stalls)`, and its number of calls
        times members.
    - `num_ops`, `num_ranks`, `num_microbatches`: of a replica of the pipeline.
    - `strata`: how the replica samples are divided.
    - `num_replicas`: how many copies of the pipeline there are, which meet only at the end of a
        step.
    - `group_size`: the number of GPUs in each pipeline rank of a replica.
    - `worker_size`: how many of these GPUs are a worker, which run one microbatch together.
    - `world_size`: the number of GPUs of the job.
    - `adjustment`: further factors on ops, or `None`.
    - `loads`: the loads of the members of expert-parallel groups, or `None` if all loads are equal.
    """

    latencies: LatencyTable
    variability: Variability
    levels: Levels
    ops: Ops
    rows: Rows
    blocks: Blocks
    sinks: Sinks
    tail: int = eqx.field(static=True)
    stall_ops: Int[AnyArray, " stalls"]
    stall_kinds: Int[AnyArray, " stalls"]
    stall_counts: Int[AnyArray, " stalls"]
    num_ops: int = eqx.field(static=True)
    num_ranks: int = eqx.field(static=True)
    num_microbatches: int = eqx.field(static=True)
    strata: tuple[Stratum, ...] = eqx.field(static=True)
    num_replicas: int = eqx.field(static=True)
    group_size: int = eqx.field(static=True)
    worker_size: int = eqx.field(static=True)
    world_size: int = eqx.field(static=True)
    adjustment: Adjustment | None = None
    loads: Loads | None = None

    def summary(self) -> Table:
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
            *((f"largest: {name}", value) for name, value in _largest(self)),
        ]
        return Table((), rows, "Program of a training step")


def _largest(program: Program, number: int = 6) -> list[tuple[str, float]]:
    """The largest entry of each array of parameters. Of a gradient, which is a program too, these
    are the largest derivatives.
    """
    entries = []
    kernels = program.latencies
    for path, leaf in jax.tree_util.tree_leaves_with_path(
        eqx.filter(program, eqx.is_inexact_array)
    ):
        name = jax.tree_util.keystr(path).removeprefix(".")
        values = np.ravel(leaf)
        most = int(np.argmax(np.abs(values)))
        if name.startswith("latencies."):
            kind = kernels.kinds[kernels.kind[most]]
            name += f"[{most}], {kind} {kernels.sizes[most]}"
        elif np.ndim(leaf):
            name += f"[{most}]"
        entries.append((name, float(values[most])))
    return sorted(entries, key=lambda entry: -abs(entry[1]))[:number]


def stall_rate(program: Program) -> float:
    """The expected number of stalls in one step of one replica."""
    stalls = program.variability.stalls
    rates = np.array([float(stalls[kind].rate) for kind in sorted(stalls)])
    return float(rates[program.stall_kinds] @ program.stall_counts)


def digest(program: Program) -> str:
    """Sixty-four hexadecimal digits that depend on the program and the values of its parameters."""
    state = hashlib.sha256()
    _feed(state, program)
    return state.hexdigest()


def _feed(state, value: Any) -> None:
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        array = np.asarray(value)
        state.update(f"{array.dtype.str}{array.shape}".encode())
        # Text has a width that depends on the longest word; objects have no bytes of their own.
        state.update(array.tobytes() if array.dtype.kind != "O" else repr(array.tolist()).encode())
    elif dataclasses.is_dataclass(value):
        state.update(type(value).__qualname__.encode())
        for field in dataclasses.fields(value):
            state.update(field.name.encode())
            _feed(state, getattr(value, field.name))
    elif isinstance(value, dict):
        for name in sorted(value):
            state.update(repr(name).encode())
            _feed(state, value[name])
    elif isinstance(value, tuple | list) and not all(isinstance(item, str) for item in value):
        state.update(f"{len(value)}".encode())
        for item in value:
            _feed(state, item)
    else:
        state.update(repr(value).encode())


def sizes_of(program: Program) -> dict[str, int]:
    """For how many of everything there is room in a plan, by the names of axes."""
    number, width, fan_in = program.levels.reads.shape
    blocks, levels, adjustment = program.blocks, bucket(number, 1024, 4), program.adjustment
    segments, waits = blocks.members, blocks.waits and blocks.waits.count
    return {
        "levels": levels,
        "ops": levels * width,
        "fan_in": bucket(fan_in, 2),
        "sinks": bucket(program.sinks.number, 16),
        "fan": bucket(program.levels.sinks.shape[1], 1),
        "rows": bucket(len(program.rows.rank), 64),
        "ranks": bucket(program.num_ranks, 16),
        "stalls": bucket(len(program.stall_ops), 64, 4),
        "strata": bucket(len(program.strata), 8),
        "groups": bucket(0 if adjustment is None else adjustment.latency.shape[-1], 16),
        "classes": bucket(len(blocks.direct), 64),
        "kernels": bucket(len(program.latencies.kind), 64),
        "segments": bucket(0 if segments is None else len(segments), 32),
        "waits": bucket(0 if waits is None else len(waits), 8),
    }


def check_means(mean: np.ndarray, name: Callable[[int], str], dtype: DTypeLike) -> None:
    """Raises a `ValueError` of one sentence if a mean latency cannot be computed with in `dtype`.

    **Arguments:**

    - `mean`: the mean latencies, in seconds.
    - `name`: what has each of them.
    """
    info, longest = np.finfo(dtype), mean.max(axis=-1, keepdims=True, initial=0)
    # Derivatives hold squares of the longest; what shorter ones lose does not matter beside it.
    most = float(info.max) ** 0.47
    problems = (
        (
            ~(np.isfinite(mean) & (mean >= 0)),
            "negative or not finite; give one that is finite and not negative",
        ),
        (
            (mean > 0) & (mean < info.tiny),
            f"less than the least number that {info.dtype} holds, {info.tiny:.2g} s; give 0 or a "
            "longer one, or set `jax_enable_x64`",
        ),
        (
            (mean == longest) & (mean > 0) & ~((mean >= 1 / most) & (mean <= most)),
            f"and the longest must be between {1 / most:.0e} and {most:.0e} s in {info.dtype}; "
            "give all latencies in another unit, or set `jax_enable_x64`",
        ),
    )
    for is_bad, problem in problems:
        if is_bad.any():
            first = int(np.argmax(is_bad))
            raise ValueError(f"{name(first)} has a mean latency of {mean[first]:.6g} s, {problem}.")


def check_scale(name: str, mean: float, dtype: DTypeLike) -> None:
    """Raises a `ValueError` of one sentence if `dtype` does not hold cubes of a law's mean."""
    most = float(np.finfo(dtype).max) ** 0.32
    if not 1 / most <= mean <= most:
        raise ValueError(
            f"The law of {name} has a mean of {mean:.6g}, and {np.finfo(dtype).dtype} holds cubes "
            f"of {1 / most:.0e} to {most:.0e} only; give means as numbers, and the law, with a "
            "mean of about one, as the residual of a kind in `variability`."
        )
