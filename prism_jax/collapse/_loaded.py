"""The effect of the loads of expert-parallel groups on the collapse.

In a segment, a member with the load `l` takes `X + l Y`, times the factor of its GPU; the segment
waits for the slowest member. The members are the independent ones of `Fullest`, with three moments,
as `segment_maxima` requires. The difference to the fullest of members that share a fixed number of
tokens is added at the speed of the mean GPU: it is large if one member has most tokens, and this
member may be on any GPU.

A member's load is drawn anew for each microbatch, layer and step. If the popularities of experts
are known, they are constant, also over replicas, and only the counts of tokens are drawn.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from .._misc import FrozenArray
from ..workload import Kernel, Load
from ._expert_load import Fullest, Loads, Unevenness


_SIZES = ("members", "counts", "experts", "split", "capacity")


class ExpertLoads(eqx.Module):
    """The loads of a program's expert-parallel groups, and the kernels that they act on.

    **Attributes:**

    - `unevenness`: the parameters of each load.
    - `members`, `counts`, `experts`, `split`, `capacity`: as in `Loads`. Static.
    - `kernels`: `(loads, kernels)`, whether a load acts on a kernel. Static.
    - `shares`: as in `Loads`. Static.
    """

    unevenness: Unevenness
    members: FrozenArray = eqx.field(static=True)
    counts: FrozenArray = eqx.field(static=True)
    experts: FrozenArray = eqx.field(static=True)
    split: FrozenArray = eqx.field(static=True)
    capacity: FrozenArray = eqx.field(static=True)
    kernels: FrozenArray = eqx.field(static=True)
    shares: FrozenArray | None = eqx.field(static=True, default=None)

    def laws(self, dtype: DTypeLike) -> Loads:
        """The laws without their parameters, as arrays."""
        sizes: dict[str, Any] = {
            name: jnp.asarray(getattr(self, name).value, dtype) for name in _SIZES
        }
        if not np.isfinite(self.capacity.value).any():
            sizes["capacity"] = None
        shares = None if self.shares is None else jnp.asarray(self.shares.value, dtype)
        return Loads(**sizes, shares=shares)

    def of_kernels(self, number: int, dtype: DTypeLike) -> Float[Array, "loads kernels"]:
        """One where a load acts on a kernel, padded to `number` kernels."""
        kernels = self.kernels.value
        return jnp.asarray(np.pad(kernels, ((0, 0), (0, number - kernels.shape[1]))), dtype)


def expert_loads(kernels: Sequence[Kernel], dtype: DTypeLike) -> ExpertLoads | None:
    """The loads of a program's kernels; `None` if all loads are equal."""
    loads = list(dict.fromkeys(kernel.load for kernel in kernels if kernel.load is not None))
    if not loads:
        return None
    sizes = {name: FrozenArray(np.array([getattr(one, name) for one in loads])) for name in _SIZES}
    return ExpertLoads(
        unevenness=Unevenness(
            jnp.asarray([one.concentration for one in loads], dtype), jnp.ones(len(loads), dtype)
        ),
        kernels=FrozenArray(np.array([[k.load == one for k in kernels] for one in loads])),
        shares=_shares(loads),
        **sizes,
    )


def _shares(loads: Sequence[Load]) -> FrozenArray | None:
    """The popularities of experts, by member, if some are known."""
    if not any(one.popularity for one in loads):
        return None
    room = (max(one.members for one in loads), max(one.experts for one in loads))
    found = np.full((len(loads), *room), np.nan)
    for row, one in zip(found, loads, strict=True):
        if one.popularity:
            shares = np.array(one.popularity) / np.sum(one.popularity)
            row[: one.members, : one.experts] = shares.reshape(one.members, one.experts)
    return FrozenArray(found)


def added_load(
    loads: Float[Array, "loads kernels"],
    cumulants: Float[Array, "3 kernels"],
    segments: Float[Array, "segments kernels"],
    load: Fullest,
) -> Float[Array, "3 segments"]:
    """The contribution of loads to the cumulants of each member's part of a segment."""
    mean, variance = _loaded(loads, cumulants[:2], segments)
    middle, spread, skewed = load.member[:, :, None]
    return jnp.stack(
        [
            jnp.sum(mean * (middle - 1), axis=0),
            jnp.sum(mean**2 * spread + variance * (spread + middle**2 - 1), axis=0),
            jnp.sum(mean**3 * skewed, axis=0),
        ]
    )


class Deciding(NamedTuple):
    """Which members of segments decide when these end, as of `Fullest`.

    **Attributes:**

    - `share`: the part of the members.
    - `first`: `(segments, members)`, one for the fullest; `None` where it is never known.
    """

    share: Float[Array, " segments"]
    first: Float[Array, "segments members"] | None


def deciding(
    loads: Float[Array, "loads kernels"],
    segments: Float[Array, "segments kernels"],
    load: Fullest,
) -> Deciding:
    """Which members of segments decide when these end."""
    there = segments @ loads.T > 0
    shares = jnp.where(there, load.share[None, :], 1)
    share = jnp.min(shares, axis=1, initial=1)
    return Deciding(share, None if load.first is None else load.first[jnp.argmin(shares, axis=1)])


def fuller(
    slowest: Float[Array, "4 segments nodes"],
    loads: Float[Array, "loads kernels"],
    cumulants: Float[Array, "3 kernels"],
    segments: Float[Array, "segments kernels"],
    load: Fullest,
) -> Float[Array, "4 segments nodes"]:
    """The slowest of independent members, corrected for the difference to the true fullest member.

    **Arguments:**

    - `slowest`: the result of `segment_maxima` for each segment.
    - `loads`, `cumulants`, `segments`, `load`: as in `added_load`.
    """
    (mean,) = _loaded(loads, cumulants[:1], segments)
    powers = jnp.stack([mean, mean**2, mean**3])
    more = jnp.sum(powers * load.correction[:, :, None], axis=1)[:, :, None]
    first, variance, third = slowest[:3] + more
    # The part that other GPUs share is at most the rest.
    return jnp.stack([first, jnp.maximum(variance, 0), third, slowest[3]])


def at_fullest(
    loads: Float[Array, "loads kernels"], cumulants: Float[Array, "3 kernels"], load: Fullest
) -> Float[Array, "3 kernels"]:
    """The cumulants of each kernel at the load of the fullest member, for collectives."""
    none = (1 - jnp.sum(loads, axis=0))[None]
    middle, spread, skewed = load.load @ loads + none * jnp.asarray([[1], [0], [0]], none.dtype)
    mean, variance, third = cumulants
    return jnp.stack(
        [
            mean * middle,
            variance * (middle**2 + spread) + mean**2 * spread,
            third * middle**3 + mean**3 * skewed,
        ]
    )


def _loaded(loads, cumulants, segments) -> Float[Array, "orders loads segments"]:
    """The cumulants of the part of each segment that each load acts on."""
    return jnp.einsum("lk,jk,sk->jls", loads, cumulants, segments)
