"""Changes to groups of ops: what sensitivities are taken by, and what-ifs set."""

import equinox as eqx
from jaxtyping import Array, Float

from .._misc import FrozenArray


class Adjustment(eqx.Module):
    """Factors on ops that one tells apart. All are parameters; ones change nothing.

    **Attributes:**

    - `group`: `(ops,)`, the group of each op. Static.
    - `latency`: on the latency of the ops of each group; their stalls are left as they are.
    - `spread`: on how far each op's own draw takes it from its mean, which stays. For kernels with
        a log-normal law it multiplies `sigma`.
    - `gpu`: for each pipeline rank, on how far the factor of its slowest GPU is from one.
    """

    group: FrozenArray = eqx.field(static=True)
    latency: Float[Array, " groups"]
    spread: Float[Array, " groups"]
    gpu: Float[Array, " ranks"]
