"""Programs whose derivatives are compared with central differences."""

from typing import Any

import jax.numpy as jnp

from prism_jax.latency import Gamma, LogNormal, Normal, Weibull
from prism_jax.program import Network, Stall, Variability
from prism_jax.schedule import GPipe, InterleavedOneFOneB, OneFOneB
from tests.helpers import lognormal, one_kernel, pipeline_program


def programs() -> dict[str, Any]:
    """Small graphs with all that a program may have."""
    shared = {"rank": lognormal(0.02), "step": lognormal(0.01), "microbatch": lognormal(0.03)}
    own = {"step": lognormal(0.01)}
    stalls = {"gemm": Stall(jnp.asarray(2e-3), lognormal(0.5))}
    # One kind is long and the other short.
    two = {**stalls, "send_recv": Stall(jnp.asarray(4e-3), LogNormal(0.1, 0.5))}
    congested = {"network": Network(jnp.asarray(0.2), jnp.asarray(2.0)), "stalls": two}
    families = {"log-normal": LogNormal(1.0, 0.08), "normal": Normal(1.0, 0.08)}
    families |= {"gamma": Gamma(1.0, 0.08), "weibull": Weibull(1.0, 12.0)}
    noise = {"gemm": lognormal(0.08), "send_recv": lognormal(0.3)}
    tail = {"tail": one_kernel("optimizer", 1.0)}
    reduction = one_kernel("reduce_scatter", 0.5, "network")
    both = {**tail, "reduction": reduction, "network_links": ("network",)}
    of_64 = {"num_replicas": 64}

    def made(schedule, laws: Any = None, residual: Any = noise, **options):
        variability = Variability(residual=residual, **(laws or {}))
        return pipeline_program(schedule, variability=variability, **options)

    pipeline, interleaved = OneFOneB(3, 4), InterleavedOneFOneB(3, 6, 2)
    long_tail = {**noise, "optimizer": lognormal(0.3)}
    of_two = own | {"stalls": two}
    return {
        **{f"chain, {n}": made(GPipe(1, 6), None, {"gemm": law}) for n, law in families.items()},
        "diamond": made(GPipe(2, 2)),
        "ties: nothing varies but a factor": made(pipeline, {"step": lognormal(0.02)}, {}),
        "1f1b": made(pipeline),
        "1f1b, random tail": made(pipeline, None, long_tail, **tail),
        "1f1b, shared factors": made(pipeline, shared, **both),
        "1f1b, stalls": made(pipeline, own | {"stalls": stalls}, **both),
        "1f1b, two kinds of stalls": made(pipeline, of_two, **tail),
        "1f1b, two kinds of stalls, 64 replicas": made(pipeline, of_two, **of_64, **tail),
        "1f1b, everything, 16 replicas": made(
            pipeline, shared | congested, num_replicas=16, **both
        ),
        "interleaved, 64 replicas": made(interleaved, shared, **of_64, **both),
    }
