import jax
import numpy as np
from jax.core import Tracer

from ._base import AbstractLatency


def check(latency: AbstractLatency) -> None:
    """Checks the values of every parameter of a latency, on the host.

    Constructors check shapes only, because they also run under `jax.jit`. Traced values are not
    checked here either.

    **Arguments:**

    - `latency`: a latency. Latencies that it contains are checked too.

    **Raises:**

    `ValueError` that names the family and the parameter, and says what was given and what is
    allowed.
    """
    for name, value, holds, allowed in latency.rules():
        if isinstance(value, Tracer):
            continue
        value = np.asarray(value)
        bad = ~np.broadcast_to(holds(value), value.shape)
        if bad.any():
            index = tuple(int(i) for i in np.argwhere(bad)[0])
            where = f"[{', '.join(map(str, index))}]" if index else ""
            raise ValueError(
                f"`{type(latency).__name__}` got `{name}{where}={value[index]}`; it must be "
                f"{allowed}."
            )
    parts = jax.tree.leaves(
        latency, is_leaf=lambda x: isinstance(x, AbstractLatency) and x is not latency
    )
    for part in parts:
        if isinstance(part, AbstractLatency):
            check(part)
