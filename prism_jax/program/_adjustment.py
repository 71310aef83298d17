"""Changes to groups of ops, which sensitivities differentiate and what-ifs set."""

import equinox as eqx
from jaxtyping import Array, Float

from .._misc import FrozenArray


class Adjustment(eqx.Module):
    """Factors on groups of ops. All are parameters. A factor of one changes nothing.

    **Attributes:**

    - `group`: `(ops,)`, the group of each op. Static.
    - `latency`: a factor on the latency of the ops of each group. It does not act on stalls.
    - `spread`: a factor on the deviation of each op from its mean by its own noise. For kernels
        with a log-normal law it multiplies `sigma`.
    - `gpu`: for each pipeline rank, a factor on the deviation from one of the factor of its slowest
        GPU.
    """

    group: FrozenArray = eqx.field(static=True)
    latency: Float[Array, " groups"]
    spread: Float[Array, " groups"]
    gpu: Float[Array, " ranks"]
