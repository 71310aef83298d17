"""How much of a stall is hidden.

A member that stalls may not be the one that the others wait for, and collectives beside it may last
longer. Of a stall of `S`, `max(S - D, 0)` delays the op, where `D` is how long the member waits
otherwise: its slack, which is taken to be the mean over members. Slacks add up where several waits
follow: of members, of what runs beside them, of groups. What is hidden adds up over the calls of a
class, and the slack of a class is the one that hides as much.

Of two stalls before the same wait on different members, the longer one counts. Which calls stall is
not known of an op, so that of two of its stalls as much of the shorter one is hidden as is likely
to be: of all pairs of the class's calls, the share that are before the same wait on different
members.
"""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


class Stalls(eqx.Module):
    """The stalls of kernels.

    **Attributes:**

    - `rates`: how many stalls a call has.
    - `members`: how many members run each op.
    - `sizes`: equally likely sizes of those of each kind, increasing, in the unit of latencies.
    - `kernels`: one where a kernel has stalls of the kind.
    """

    rates: Float[Array, " kinds"]
    members: Float[Array, ""]
    sizes: Float[Array, "kinds sizes"]
    kernels: Float[Array, "kinds kernels"]


class Hidden(NamedTuple):
    """What is hidden in segments or in classes.

    **Attributes:**

    - `calls`: how many calls of kernels that may stall each member makes.
    - `time`: the sum over these calls of what is hidden of a stall, by regime of the network.
    - `pairs`: for each member, the stalls of other members before the same waits, summed over its
        own.
    """

    calls: Float[Array, "kinds contents"]
    time: Float[Array, "kinds contents regimes"]
    pairs: Float[Array, "1 contents"]

    def slack(self, stalls: Stalls) -> Float[Array, "kinds contents regimes"]:
        """The slack that hides as much of the stall of any call."""
        calls = self.calls[:, :, None]
        mean = self.time / jnp.where(calls > 0, calls, 1)

        def of_kind(sizes, mean):
            slack = jnp.concatenate([jnp.zeros_like(sizes[:1]), sizes])
            return jnp.interp(
                mean, jnp.mean(jnp.minimum(slack[:, None], sizes[None]), axis=1), slack
            )

        return jax.vmap(of_kind)(stalls.sizes, mean)

    def meeting(self, stalls: Stalls) -> Float[Array, " contents"]:
        """The share of pairs of stalls that are before the same wait on different members."""
        squares = stalls.members * (stalls.rates @ self.calls) ** 2
        return self.pairs[0] / jnp.where(squares > 0, squares, 1)

    def within(
        self,
        stalls: Stalls,
        contained: Float[Array, "outer contents"],
        waits: Float[Array, "outer regimes"],
        peers: Float[Array, " outer"] | float = 0.0,
    ) -> "Hidden":
        """The same of blocks that contain these, at whose end members wait for longer still, also
        for `peers`.
        """
        there = (contained > 0).astype(contained.dtype)
        slack = jnp.einsum("oc,kcr->kor", there, self.slack(stalls)) + waits[None]
        outer = hidden(stalls, self.calls @ contained.T, slack, peers)
        return outer._replace(pairs=outer.pairs + self.pairs @ contained.T)


def hidden(
    stalls: Stalls,
    calls: Float[Array, "kinds contents"],
    slack: Float[Array, "#kinds #contents regimes"],
    peers: Float[Array, " contents"] | float = 0.0,
) -> Hidden:
    """What slacks hide of stalls, where so many `peers` make the same calls before a wait."""
    slack = jnp.maximum(slack, 0)[..., None]
    mean = jnp.mean(jnp.minimum(stalls.sizes[:, None, None, :], slack), axis=-1)
    pairs = peers * (stalls.rates @ calls) ** 2
    return Hidden(calls, calls[:, :, None] * mean, pairs[None])
