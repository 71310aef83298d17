"""Programs whose derivatives are compared with central differences."""

from typing import Any


def programs() -> dict[str, Any]:
    """Small graphs with all that a program may have."""
    import jax.numpy as jnp

    from prism_jax.latency import Gamma, LogNormal, Normal, Weibull
    from prism_jax.program import Network, Stall, Variability
    from prism_jax.schedule import GPipe, InterleavedOneFOneB, OneFOneB
    from tests.helpers import lognormal, one_kernel, pipeline_program

    shared = {"rank": lognormal(0.02), "step": lognormal(0.01), "microbatch": lognormal(0.03)}
    congested = Network(jnp.asarray(0.2), jnp.asarray(2.0))
    stalls = {"gemm": Stall(jnp.asarray(2e-3), lognormal(0.5))}
    # One kind is long and the other short.
    two = {**stalls, "send_recv": Stall(jnp.asarray(4e-3), LogNormal(0.1, 0.5))}
    families = {
        "log-normal": LogNormal(1.0, 0.08),
        "normal": Normal(1.0, 0.08),
        "gamma": Gamma(1.0, 0.08),
        "weibull": Weibull(1.0, 12.0),
    }
    noise = {"gemm": lognormal(0.08), "send_recv": lognormal(0.3)}
    tail = {"tail": one_kernel("optimizer", 1.0)}
    reduction = {"reduction": one_kernel("reduce_scatter", 0.5, "network")}
    options = {**tail, **reduction, "network_links": ("network",)}

    def made(schedule, residual=noise, **rest):
        names = ("rank", "step", "microbatch", "network", "stalls")
        laws = {name: rest.pop(name) for name in names if name in rest}
        return pipeline_program(
            schedule, variability=Variability(residual=residual, **laws), **rest
        )

    return {
        **{f"chain, {n}": made(GPipe(1, 6), {"gemm": law}) for n, law in families.items()},
        "diamond": made(GPipe(2, 2)),
        "ties: nothing varies but a factor": made(OneFOneB(3, 4), {}, step=lognormal(0.02)),
        "1f1b": made(OneFOneB(3, 4)),
        "1f1b, random tail": made(OneFOneB(3, 4), {**noise, "optimizer": lognormal(0.3)}, **tail),
        "1f1b, shared factors": made(OneFOneB(3, 4), **shared, **options),
        "1f1b, stalls": made(OneFOneB(3, 4), stalls=stalls, step=lognormal(0.01), **options),
        "1f1b, two kinds of stalls": made(OneFOneB(3, 4), stalls=two, step=lognormal(0.01), **tail),
        "1f1b, two kinds of stalls, 64 replicas": made(
            OneFOneB(3, 4), stalls=two, step=lognormal(0.01), num_replicas=64, **tail
        ),
        "1f1b, everything, 16 replicas": made(
            OneFOneB(3, 4), **shared, network=congested, stalls=two, num_replicas=16, **options
        ),
        "interleaved, 64 replicas": made(
            InterleavedOneFOneB(3, 6, 2), **shared, num_replicas=64, **options
        ),
    }
