"""How replica samples are divided by rare events: the network's regime, the number of stalls."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, UInt32

from ..maxplus import bucket
from ..program import Program


class Strata(eqx.Module):
    """The strata of a program.

    **Attributes:**

    - `bounds`: where, of 2^32, the share of each ends.
    - `regime`, `stalls`: the regime and the number of stalls of each stratum.
    - `number`: how many there are; the rest is padding.
    """

    bounds: UInt32[Array, " strata"]
    regime: Int[Array, " strata"]
    stalls: Int[Array, " strata"]
    number: Int[Array, ""]


def strata_of(program: Program) -> Strata:
    """The strata of a program."""
    number = len(program.strata)
    padding = bucket(number, 8) - number
    share = np.array([s.share for s in program.strata])
    bounds = np.minimum(np.cumsum(share) * 2.0**32, 2.0**32 - 1).astype(np.uint32)
    bounds[-1] = 2**32 - 1
    regime = np.array([s.regime for s in program.strata], np.int32)
    stalls = np.array([s.stalls for s in program.strata], np.int32)
    return Strata(
        bounds=jax.device_put(np.pad(bounds, (0, padding), mode="edge")),
        regime=jax.device_put(np.pad(regime, (0, padding), mode="edge")),
        stalls=jax.device_put(np.pad(stalls, (0, padding), mode="edge")),
        number=jax.device_put(np.int32(number)),
    )


def stratum_of(strata: Strata, sample_ids: UInt32[Array, " samples"]) -> Int[Array, " samples"]:
    """The number of each sample's stratum.

    Strata are dealt out along a Weyl sequence, so any run of consecutive ids has each in
    proportion to its share.
    """
    sequence = sample_ids * np.uint32(0x9E3779B9)
    which = jnp.sum(sequence[None, :] >= strata.bounds[:, None], axis=0, dtype=jnp.int32)
    return jnp.minimum(which, strata.number - 1)


def regimes_and_stalls(
    strata: Strata, sample_ids: UInt32[Array, " samples"]
) -> tuple[Int[Array, " samples"], Int[Array, " samples"]]:
    """The regime of the network and the number of stalls of each sample."""
    which = stratum_of(strata, sample_ids)
    return strata.regime[which], strata.stalls[which]
