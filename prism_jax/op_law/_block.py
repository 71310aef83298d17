"""Collapses the kernels of a block into one latency (mean, standard deviation, skewness).

A block is a row of segments. Within a segment every member of the tensor- and context-parallel
group runs its kernels independently, perhaps overlapped with collectives; then a collective waits
for the slowest. Cumulants of sums add up; `_segment` has those of the slowest member, `_branches`
those of overlapped compute and collectives.

With loads of expert-parallel groups, a member with the load `l` takes `X + l Y` in a segment, times
the factor of its GPU; the segment waits for the slowest member. The members are the independent
ones of `Fullest`, with three moments, as `segment_maxima` requires. The difference to the fullest
of members that share a fixed number of tokens is added at the speed of the mean GPU: it is large if
one member has most tokens, and this member may be on any GPU.

The loads of members are drawn for each microbatch, layer and step, and are the same in all ops: see
`_sways`. If the popularities of experts are known, they are constant, also over replicas, and only
the counts of tokens are drawn.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..latency import root, shape_of
from ..loads import Fullest, Loads
from ..program import Blocks, Overlaps, Waits
from ._branches import branch_moments
from ._segment import (
    NODE_SCORES,
    GroupFactors,
    group_maxima,
    mean_factor,
    segment_alone,
    segment_maxima,
)
from ._stalls import Hidden, Stalls, hidden
from ._sways import (
    apart_from_loads,
    of_pieces,
    share_of_load,
    shared_by_ops,
    sways_of_kernels,
)


class Deciding(NamedTuple):
    """Which members of segments decide when these end, as of `Fullest`.

    **Attributes:**

    - `share`: the part of the members.
    - `first`: `(segments, members)`, one for the fullest; `None` where it is never known.
    """

    share: Float[Array, " segments"]
    first: Float[Array, "segments members"] | None


class ClassMoments(NamedTuple):
    """The moments of classes, by regime of the network and factor of the slowest GPU at
    `NODE_SCORES`; of latencies in the unit of the kernels'.

    **Attributes:**

    - `skewness`: of each segment on one member; zero if no other member waits.
    - `moments`: the mean, the standard deviation and the skewness of the part that each op draws
        anew.
    - `shared`: the standard deviation of the part that all ops of a rank share in a sample, because
        its other GPUs are the same.
    - `communication`: the first three for the communication of each class alone, on which factors
        of GPUs do not act; `None` unless asked for.
    - `load`: the standard deviation and the skewness of the part that all ops of a stage and
        microbatch share, because each of its layers has one load there; `None` if loads are equal.
    - `slack`, `meeting`: the slack that hides stalls of each kind, and the share of pairs of stalls
        that meet, of `_stalls`; `None` if nothing stalls.
    """

    skewness: Float[Array, " segments"]
    moments: Float[Array, "3 classes regimes nodes"]
    shared: Float[Array, "classes regimes nodes"]
    communication: Float[Array, "3 classes regimes"] | None
    load: Float[Array, "2 classes regimes"] | None = None
    slack: Float[Array, "kinds classes regimes"] | None = None
    meeting: Float[Array, " classes"] | None = None


def class_moments(
    blocks: Blocks,
    cumulants: Float[Array, "3 kernels"],
    network: Float[Array, " kernels regimes"],
    groups: GroupFactors,
    loads: Loads | None = None,
    load: Fullest | None = None,
    stalls: Stalls | None = None,
    *,
    apart: bool = False,
) -> ClassMoments:
    """The moments of each class.

    The shared parts of segments are taken to be fully correlated, even between segments of
    different spreads, whose correlation is slightly below one. Overlapped collectives count as
    communication as far as they decide the end, which is exact to first order in a factor on
    compute. Differentiable with respect to everything except indices.

    **Arguments:**

    - `blocks`: the contents of the classes, some of which have several kernels.
    - `cumulants`: the cumulants of each kernel's latency, in units of `unit_of_time` the means: in
        seconds, third cumulants of kernels would underflow in single precision.
    - `network`: the factor on each kernel in each regime.
    - `groups`: the factors of the GPUs of each group.
    - `loads`, `load`: the loads of their members, and the laws of the fullest, if there are any.
    - `stalls`: of the kernels, if they stall.
    - `apart`: whether to return the figures of communication alone.
    """
    laid_out: Any = blocks  # With several kernels, so that no field is `None`.
    acts: Any = None if loads is None else loads.kernels
    layers: Any = None if loads is None else loads.layers
    members, means = cumulants @ laid_out.segments.T, cumulants[0]
    skewness = jnp.where(laid_out.members > 1, shape_of(members[1], members[2])[1], 0)
    decide = Deciding(jnp.ones_like(laid_out.members), None)
    if load is not None:
        members = members + added_load(acts, cumulants, laid_out.segments, load)
        decide = deciding(acts, laid_out.segments, load)
    of_members = jax.tree.map(lambda x: x[laid_out.group], groups)

    def slowest_of(segment):
        moments, group, *members = segment
        # Most rows are padding: a loop with a branch, not `vmap`, which would compute both.
        alone = members[0] <= 1
        return jax.lax.cond(alone, segment_alone, segment_maxima, *moments, group, *members)

    arguments = members.T, of_members, laid_out.members, decide.share
    # Computed again for the derivative, which is faster than keeping it for all rows.
    slowest = jnp.moveaxis(jax.lax.map(jax.checkpoint(slowest_of), arguments), 0, 1)
    powers = jnp.stack([network, network**2, network**3])
    of_kernels = in_segments = in_kernels = hides = none = None
    if load is not None:
        slowest = fuller(slowest, acts, cumulants, laid_out.segments, load)
        of_kernels = sways_of_kernels(acts, cumulants[0], load)
        (mean,) = _loaded(acts, cumulants[:1], laid_out.segments)
        by_load = jnp.sum(mean**2 * load.member[1][:, None], axis=0)
        follows = share_of_load(members[1], by_load, decide.share * laid_out.members)
        in_segments = of_pieces(of_kernels @ laid_out.segments.T * follows[None])[:, :, None]
        in_kernels = of_pieces(of_kernels[:, :, None] * network[None])
        in_kernels = jnp.einsum("ck,ikr->icr", laid_out.class_collectives, in_kernels)
        cumulants = at_fullest(acts, cumulants, load)
    if stalls is not None:
        segment_means = laid_out.segments @ means * mean_factor(of_members, laid_out.members)
        waits = slowest[0, :, len(NODE_SCORES) // 2] - segment_means
        calls, peers = stalls.kernels @ laid_out.segments.T, jnp.maximum(laid_out.members - 1, 0)
        hides = hidden(stalls, calls, waits[None, :, None], peers)
        calls = stalls.kernels @ laid_out.class_collectives.T
        none = hidden(stalls, calls, jnp.zeros((1, 1, network.shape[1]), waits.dtype))
    no_part = jnp.zeros_like(slowest[:3, :, :1])
    segments = _Figures(slowest[:, :, None], no_part, in_segments, hides)
    part = jnp.einsum("ck,jk,jkr->jcr", laid_out.class_collectives, cumulants, powers)
    stacked = jnp.concatenate([part, jnp.zeros_like(part[:1])])[..., None]
    serial = _Figures(stacked, part, in_kernels, none).plus(segments, laid_out.class_segments)
    shared = _shared(laid_out.class_segments, slowest[3], decide)
    serial = serial._replace(whole=serial.whole.at[3].set(shared[:, None]))
    kernels = _Kernels(cumulants, network, of_kernels, stalls)
    stacked, part, sways, hides = _joined(blocks, kernels, groups, segments, serial, apart=apart)
    of_ops = slack = meeting = None
    stacked, shared = stacked[:3], stacked[3]
    if sways is not None and layers is not None:
        stacked = apart_from_loads(stacked, sways)
        of_ops = shared_by_ops(sways, layers)
        # What communication has of it is taken out of the whole, and so at most what is left.
        part = part.at[1].set(jnp.minimum(part[1], stacked[1].min(axis=-1)))
    if hides is not None and stalls is not None:
        slack, meeting = hides.slack(stalls), hides.meeting(stalls)
    communication = _moments(part) if apart else None
    return ClassMoments(skewness, _moments(stacked), shared, communication, of_ops, slack, meeting)


class _Figures(NamedTuple):
    """Of segments or classes.

    **Attributes:**

    - `whole`: as of `segment_maxima`, by regime of the network.
    - `part`: the part of communication in the first three, at the middle node.
    - `sways`, `hidden`: how far they go with loads, as in `_sways`, and what they hide of stalls.
        `None` if loads are equal, or if nothing stalls.
    """

    whole: Float[Array, "4 classes #regimes nodes"]
    part: Float[Array, "3 classes #regimes"]
    sways: Float[Array, "4 classes #regimes"] | None
    hidden: Hidden | None

    def plus(self, contents: "_Figures", classes: Float[Array, "classes contents"]) -> "_Figures":
        """With what is in classes that contain others so often: all figures are sums."""

        def add(figure, of_contents):
            return figure + jnp.einsum("co,io...->ic...", classes, of_contents)

        return jax.tree.map(add, self, contents)


class _Kernels(NamedTuple):
    """What is known of kernels: their cumulants, the factors of the network, how far they go with
    loads, and their stalls.
    """

    cumulants: Float[Array, "3 kernels"]
    network: Float[Array, "kernels regimes"]
    sways: Float[Array, "2 kernels"] | None
    stalls: Stalls | None


def _joined(
    blocks: Blocks,
    kernels: _Kernels,
    groups: GroupFactors,
    segments: _Figures,
    serial: _Figures,
    *,
    apart: bool,
) -> _Figures:
    """The figures of classes with branches and waits, from those with segments and collectives.
    Waits may contain branches, as those of experts do, and branches waits, as units of FSDP do: two
    rounds, each with the contents that the one before has found.
    """

    def with_branches(figures: _Figures, sides: Overlaps | None, inner: _Figures) -> _Figures:
        if sides is None:
            return figures
        cumulants, network, of_kernels, stalls = kernels
        of_loads = None
        if inner.sways is not None and of_kernels is not None:
            of_loads = inner.sways, of_kernels
        ends, of_part, sway, waits = branch_moments(
            sides, cumulants, network, inner.whole, inner.part, of_loads, apart=apart
        )
        hides = inner.hidden
        if stalls is not None and hides is not None:
            hides = hides.within(stalls, sides.compute, waits)
        return figures.plus(_Figures(ends, of_part, sway, hides), sides.classes)

    alone = with_branches(serial, blocks.branches, segments)
    figures = _until_met(blocks.waits, groups, kernels.stalls, alone)
    for _ in range(1 if blocks.waits is None else 2):
        figures = with_branches(alone, blocks.outer_branches, figures)
        figures = _until_met(blocks.waits, groups, kernels.stalls, figures)
    return figures


def _until_met(
    waits: Waits | None, groups: GroupFactors, stalls: Stalls | None, figures: _Figures
) -> _Figures:
    """The figures of classes with the waits in them."""
    if waits is None:
        return figures

    def add(figures: _Figures, wait: Waits):
        inner = jax.tree.map(lambda x: x[:, wait.within], figures)
        group = jax.tree.map(lambda x: x[wait.group], groups)
        gpus = groups.slowest[0], group, wait.count
        slowest, fixed, remains = group_maxima(inner.whole, inner.part, *gpus)
        sways, hides = inner.sways, figures.hidden
        if sways is not None:
            sways = (sways * jnp.stack([root(remains)] * 2 + [remains, remains**1.5]))[:, None]
        if stalls is not None and hides is not None:
            middle = slowest.shape[-1] // 2
            share = mean_factor(group, wait.count) / groups.slowest[0, middle]
            apart = inner.part[0]
            own_mean = apart + share * (inner.whole[0, :, middle] - apart)
            contained = jax.nn.one_hot(wait.within, len(wait.classes), dtype=own_mean.dtype)[None]
            waited = (slowest[0, :, middle] - own_mean)[None]
            hides = hides.within(stalls, contained, waited, ((wait.count - 1) * wait.size)[None])
        of_wait = _Figures(slowest[:, None], fixed[:, None], sways, hides)
        return figures.plus(of_wait, wait.classes[:, None]), None

    return jax.lax.scan(jax.checkpoint(add), figures, waits)[0]


def _shared(
    class_segments: Float[Array, "classes segments"],
    shared: Float[Array, "segments nodes"],
    decide: Deciding,
) -> Float[Array, "classes nodes"]:
    """The standard deviation that a rank's other GPUs give to all of its ops of a class. Where it
    is known which member is the fullest, segments share its GPU if it is the same member, and the
    variances of others add up.
    """
    if decide.first is None:
        return class_segments @ shared
    is_known = (decide.share < 1)[:, None]
    alone = jnp.where(is_known, shared, 0)
    of_each = jnp.einsum("cs,sn,sm->mcn", class_segments, alone, decide.first)
    return class_segments @ jnp.where(is_known, 0, shared) + root(jnp.sum(of_each**2, axis=0))


def _moments(cumulants: Float[Array, "3 *shape"]) -> Float[Array, "3 *shape"]:
    """The mean, the standard deviation and the skewness."""
    return jnp.stack([cumulants[0], *shape_of(cumulants[1], cumulants[2])])


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


def deciding(
    loads: Float[Array, "loads kernels"],
    segments: Float[Array, "segments kernels"],
    load: Fullest,
) -> Deciding:
    """Which members of segments decide when these end."""
    has_loads = segments @ loads.T > 0
    shares = jnp.where(has_loads, load.share[None, :], 1)
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
    difference = jnp.sum(powers * load.correction[:, :, None], axis=1)[:, :, None]
    first, variance, third = slowest[:3] + difference
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
