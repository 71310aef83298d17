from collections.abc import Sequence

import numpy as np
from jax.typing import DTypeLike

from .._misc import whole_number
from ..latency import AbstractLatency, check
from ..lowering import Sink
from ..schedule import OpGraph
from ..workload import Block
from ._variability import Sets, Variability


# GPUs, and copies of the pipeline, are counted in 32 bits.
_MOST = 2**31 - 1


def check_arguments(
    graph: OpGraph,
    blocks: Sequence[Block],
    sinks: Sequence[Sink],
    group_size: int,
    num_replicas: int,
) -> None:
    """Raises a `ValueError` of one sentence for arguments of `assemble` that do not fit."""
    whole_number(group_size, "group_size", most=_MOST)
    whole_number(num_replicas, "num_replicas", most=_MOST)
    if len(blocks) != graph.num_ops:
        raise ValueError(
            f"{len(blocks)} blocks were given for the ops; give one for each of the "
            f"{graph.num_ops} ops of the graph."
        )
    ranks = [sink.rank for sink in sinks]
    if ranks != sorted(ranks) or set(ranks) != set(range(graph.num_ranks)):
        raise ValueError(
            f"The sinks are of the ranks {ranks}; give some for each of the {graph.num_ranks} "
            "pipeline ranks, one rank after the other."
        )


def check_means(mean: np.ndarray, names: Sequence[str], dtype: DTypeLike) -> None:
    """Raises a `ValueError` of one sentence if a mean latency cannot be computed with in `dtype`.

    **Arguments:**

    - `mean`: the mean latencies, in seconds.
    - `names`: what has them.
    """
    info, longest = np.finfo(dtype), mean.max(initial=0)
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
    for where, problem in problems:
        if where.any():
            first = int(np.argmax(where))
            raise ValueError(
                f"{names[first]} has a mean latency of {mean[first]:.6g} s, {problem}."
            )


def check_scale(name: str, mean: float, dtype: DTypeLike) -> None:
    """Raises a `ValueError` of one sentence if `dtype` does not hold cubes of a law's mean."""
    most = float(np.finfo(dtype).max) ** 0.32
    if not 1 / most <= mean <= most:
        raise ValueError(
            f"The law of {name} has a mean of {mean:.6g}, and {np.finfo(dtype).dtype} holds cubes "
            f"of {1 / most:.0e} to {most:.0e} only; give means as numbers, and the law, with a "
            "mean of about one, as the residual of a kind in `variability`."
        )


def all_laws(variability: Variability) -> dict[str, AbstractLatency]:
    """All laws by what they are laws of; first the residuals, in the order of the kinds' names."""
    laws = {f"residual of {kind}": law for kind, law in sorted(variability.residual.items())}
    for kind, stall in sorted(variability.stalls.items()):
        laws[f"stall of {kind}"] = stall.size
    for name in ("rank", "step", "worker_step", "microbatch"):
        law = getattr(variability, name)
        if isinstance(law, AbstractLatency):
            laws[f"{name} factor"] = law
    return laws


def check_variability(variability: Variability) -> None:
    """Raises a `ValueError` of one sentence if a law or a rate has impossible parameters."""
    sets = variability.microbatch
    if isinstance(sets, Sets) and (problem := sets.problem()):
        raise ValueError(f"The law of the microbatch factor cannot be used: {problem}.")
    for name, law in all_laws(variability).items():
        try:
            check(law)
        except ValueError as error:
            raise ValueError(f"The law of the {name} cannot be used: {error}") from None
    for kind, stall in variability.stalls.items():
        if not 0 <= float(stall.rate) < 1:
            raise ValueError(
                f"The stall rate of `{kind}` is {float(stall.rate)}; it counts stalls per call and "
                "must be at least 0 and below 1."
            )
    network = variability.network
    if network is not None and not (
        0 <= float(network.probability) < 1 and float(network.slowdown) > 0
    ):
        raise ValueError(
            f"The network is congested with probability {float(network.probability)} and slowdown "
            f"{float(network.slowdown)}; give a probability in [0, 1) and a positive slowdown."
        )
