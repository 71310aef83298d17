"""How much of a stall is hidden.

A member that stalls may not be the one that the others wait for, and collectives beside it may last
longer. Of a stall of `S`, `max(S - D, 0)` delays the op, where `D` is how long the member waits
otherwise: its slack, which is taken to be the mean over members. Slacks add up where several waits
follow: of members, of what runs beside them, of groups. Of two stalls before the same wait on
different members, the longer one counts: with `k` stalls of other members to expect, each of which
hides `min(S, S')` of one of the two, `k / 2` of these means are hidden, to first order.

What is hidden adds up over the calls of a class, and the slack of a class is the one that hides as
much.
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
    - `sizes`: equally likely sizes of those of each kind, increasing, in the unit of latencies.
    - `kernels`: one where a kernel has stalls of the kind.
    """

    rates: Float[Array, " kinds"]
    sizes: Float[Array, "kinds sizes"]
    kernels: Float[Array, "kinds kernels"]


class Hidden(NamedTuple):
    """What is hidden in segments or in classes.

    **Attributes:**

    - `calls`: how many calls of kernels that may stall each member makes.
    - `time`: the sum over these calls of what is hidden of a stall, by regime of the network.
    """

    calls: Float[Array, "kinds contents"]
    time: Float[Array, "kinds contents regimes"]

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

    def within(
        self,
        stalls: Stalls,
        contained: Float[Array, "outer contents"],
        waits: Float[Array, "outer regimes"],
        others: Float[Array, " outer"] | None = None,
    ) -> "Hidden":
        """The same of blocks that contain these, at whose end members wait for longer still, also
        for `others`.
        """
        there = (contained > 0).astype(contained.dtype)
        slack = jnp.einsum("oc,kcr->kor", there, self.slack(stalls)) + waits[None]
        return hidden(stalls, self.calls @ contained.T, slack, others)

    def plus(self, more: "Hidden", classes: Float[Array, "classes contents"]) -> "Hidden":
        """With what is in classes that contain others so often."""
        return Hidden(
            self.calls + more.calls @ classes.T,
            self.time + jnp.einsum("co,kor->kcr", classes, more.time),
        )


def hidden(
    stalls: Stalls,
    calls: Float[Array, "kinds contents"],
    slack: Float[Array, "#kinds #contents regimes"],
    others: Float[Array, " contents"] | None = None,
) -> Hidden:
    """What slacks, and stalls of `others` who make the same calls, hide of stalls."""
    sizes = stalls.sizes
    slack = jnp.maximum(slack, 0)[..., None]
    mean = jnp.mean(jnp.minimum(sizes[:, None, None, :], slack), axis=-1)
    if others is not None:
        shorter = jnp.minimum(sizes[:, None, :, None], sizes[None, :, None, :])
        number = stalls.rates[:, None] * calls * others[None] / 2
        number = number / (1 + jnp.sum(number, axis=0, keepdims=True))
        # What the slack leaves of them.
        left = 1 - mean / jnp.mean(sizes, axis=1)[:, None, None]
        mean += left * (jnp.mean(shorter, axis=(2, 3)) @ number)[:, :, None]
    return Hidden(calls, calls[:, :, None] * mean)
