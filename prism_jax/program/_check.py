from collections.abc import Sequence

from ..latency import check
from ..schedule import OpGraph
from ..workload import Block
from ._sets import Sets
from ._sinks import Sink
from ._variability import Variability


def check_arguments(
    graph: OpGraph,
    blocks: Sequence[Block],
    sinks: Sequence[Sink],
    group_size: int,
    num_replicas: int,
    resolution: str,
) -> None:
    """Raises a `ValueError` of one sentence for arguments of `assemble` that do not fit."""
    if group_size < 1 or num_replicas < 1:
        raise ValueError(
            f"group_size={group_size} and num_replicas={num_replicas} must both be at least 1."
        )
    if resolution not in ("block", "kernel"):
        raise ValueError(f"`resolution={resolution!r}` must be 'block' or 'kernel'.")
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


def check_variability(variability: Variability) -> None:
    """Raises a `ValueError` of one sentence if a law or a rate has impossible parameters."""
    laws = {f"residual of {kind}": law for kind, law in variability.residual.items()}
    laws |= {f"stall of {kind}": stall.size for kind, stall in variability.stalls.items()}
    for name in ("rank", "step", "worker_step", "microbatch"):
        law = getattr(variability, name)
        if isinstance(law, Sets):
            if problem := law.problem():
                raise ValueError(f"The law of the {name} factor cannot be used: {problem}.")
        elif law is not None:
            laws[f"{name} factor"] = law
    for name, law in laws.items():
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
