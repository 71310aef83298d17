"""How far the collapse of blocks is off: `simulate` against every kernel of every member drawn by
NumPy (`tests/independent.py`), for two ranks, three microbatches and two replicas.

`python benchmarks/collapse.py`
"""

import itertools as it
import sys
from typing import Any

import jax
import numpy as np


sys.path.insert(0, __file__.rpartition("/benchmarks/")[0])
import prism_jax as prism
from prism_jax.program._assemble import assemble
from prism_jax.schedule import OneFOneB, op_graph
from prism_jax.workload import Kernel, Segment
from tests.helpers import lognormal
from tests.independent import Laws, Step, simulate_steps
from validation.tables import line, options, table


_MEMBERS, _SEGMENTS, _SIGMAS, _RANK = (8, 64), (1, 4), (0.05, 0.2, 0.4), 0.01
_LEVELS = (0.05, 0.5, 0.95, 0.99)
_ORDERS = [["0F0", "0F1", "0B0", "0F2", "0B1", "0B2"], ["0F0", "0B0", "0F1", "0B1", "0F2", "0B2"]]


def main() -> None:
    """Prints a table in Markdown."""
    options(__doc__)
    figures = ("mean", "std", "p5", "p50", "p95", "p99")
    print(table(("sigma of compute", "segments", "members", *figures), []))
    for sigma, segments, members in it.product(_SIGMAS, _SEGMENTS, _MEMBERS):
        off = (f"{x:+.1%}" for x in _errors(sigma, segments, members))
        print(line((f"{sigma:g}", segments, members, *off)), flush=True)


def _errors(sigma: float, segments: int, members: int) -> list[float]:
    """The relative errors of the mean, the standard deviation and some quantiles of a step."""
    gemm, gather = Kernel("gemm", "", 1e-3), Kernel("all_gather", "", 2e-4, "nvlink")
    sent = Kernel("send_recv", "", 5e-4, "network")
    forward, backward = (((Segment(((gemm, n),), gather), segments),) for n in (1, 2))
    ranks = {(0, 1): sent, (1, 0): sent}
    rest = (ranks, [()] * 2, (), _ORDERS, members, 2, frozenset())
    step = Step([forward] * 2, [backward] * 2, *rest)
    sigmas = {"gemm": sigma, "all_gather": 2 * sigma, "send_recv": sigma}
    graph = op_graph(OneFOneB(2, 3))
    blocks = {"F": forward, "B": backward, "SR": ((Segment((), sent), 1),)}
    residual: Any = {kind: lognormal(s) for kind, s in sigmas.items()}
    keys: Any = {"variability": prism.Variability(residual=residual, rank=lognormal(_RANK))}
    keys |= {"group_size": members, "num_replicas": 2}
    program = assemble(graph, [blocks[phase] for phase in graph.phase], **keys)
    law = prism.simulate(program, num_samples=200_000, key=jax.random.key(0), sampling="plain")
    drawn = simulate_steps(step, Laws(sigmas, _RANK), 400_000 // members, seed=1)
    quantiles = (law.quantile(q) / np.quantile(drawn, q) for q in _LEVELS)
    return [float(x) - 1 for x in (law.mean / drawn.mean(), law.std / drawn.std(), *quantiles)]


if __name__ == "__main__":
    main()
