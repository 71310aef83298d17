"""Derivatives through the weights of samples: by the rates of stalls, and by the network."""

from collections.abc import Sequence

import numpy as np

from ..replica import Tables, stall_entries, tiles
from ..step import STEP_TILES, AbstractDecision, Selection, VectorRule
from ._run import Chunk, Run


# Steps of the next ranks, whose contributions to a figure are alike but for their own draws.
_NEIGHBOURS = 15


def through_weights(
    run: Run,
    chunk: Chunk,
    decisions: Sequence[AbstractDecision],
    influences: Sequence[tuple[np.ndarray, np.ndarray, bool]],
    sums: Tables,
) -> None:
    """Through how likely stalls of each kind, and a congested network, are: adds to the derivatives
    of figures with respect to tables.

    **Arguments:**

    - `decisions`: for each figure, that of the chunk, perhaps with new weights of its samples;
        steps keep those that they picked.
    - `influences`: for each figure, its derivative with respect to the weight of each step, these
        weights, and whether this derivative is bounded: see [`Weighting`][].
    """
    if len(run.program.strata) == 1:
        return
    of_samples = np.zeros((len(influences), len(chunk.decision.kept.ids)))
    for f, (mine, influence) in enumerate(zip(decisions, influences, strict=True)):
        of_counts, of_regime, of_samples[f] = _of_figure(run, chunk, mine, *influence)
        sums.stall_counts[f] += of_counts
        sums.network[f] += of_regime
    if sums.stall_shares is not None:
        sums.stall_shares[:] += _through_entries(run, chunk, of_samples)


def _of_figure(run: Run, chunk: Chunk, weighed: AbstractDecision, influence, weights, bounded):
    """The derivatives of a figure with respect to the probabilities of each number of stalls and of
    each regime, and to the logarithm of the weight of each sample.
    """
    decision = chunk.decision
    assert isinstance(decision, VectorRule)
    assert isinstance(weighed, VectorRule)
    of_stratum = np.zeros(len(run.program.strata))
    of_regime = np.zeros(len(run.chances.network))
    of_samples = np.zeros(len(decision.kept.ids))
    regimes, position = decision.picks(0, len(influence))
    for g, selection in enumerate(weighed.selections):
        members = regimes == g
        if not members.any():
            continue
        of_regime[g] += weights[members] @ influence[members] / decision.systematic.probabilities[g]
        some = position[members], influence[members]
        if bounded:
            total = _of_picks(decision.selections[g], selection, *some)
        else:  # The slowest steps may matter more than all others, and have no neighbours.
            total = np.bincount(some[0], some[1] * weights[members], len(selection.order))
        change = selection.weight_derivatives(total)
        of_samples[selection.order] = change
        of_stratum += np.bincount(selection.stratum, change, len(of_stratum))
        of_stratum -= change.sum() * selection.mass
    # The samples of a stratum share its weight, so a relative change of it is one of theirs.
    stalls = np.array([stratum.stalls for stratum in run.program.strata])
    likely = np.asarray(run.plan.tables.stall_counts, np.float64)
    of_counts = np.bincount(stalls, of_stratum, len(likely))
    of_counts = np.where(likely > 0, of_counts / np.where(likely > 0, likely, 1), 0)
    return of_counts, of_regime, of_samples


def _of_picks(
    before: Selection, selection: Selection, position: np.ndarray, influence: np.ndarray
) -> np.ndarray:
    """What the steps that pick each sample contribute to a figure. Few steps pick samples of rare
    strata, so samples count by the probability that they are picked, with the contribution that
    steps of their rank make on average; and steps by what theirs is more than that. This difference
    is of a step's own sample and draws, so it counts by how much likelier this sample alone is
    picked than `before`: samples around it, for which the step may stand as well, would even that
    out.
    """
    from scipy.ndimage import uniform_filter1d

    order = np.argsort(position, kind="stable")
    position, influence = position[order], influence[order]
    average = uniform_filter1d(influence, _NEIGHBOURS, mode="nearest")
    samples = np.arange(len(selection.order))
    total = len(position) * selection.picked * np.interp(samples, position, average)
    old, new = before.picked[position], selection.picked[position]
    likelier = np.divide(new, old, out=np.ones(len(position)), where=old > 0)
    return total + np.bincount(position, likelier * (influence - average), len(samples))


def _through_entries(run: Run, chunk: Chunk, of_samples: np.ndarray) -> np.ndarray:
    """Through which op each stall of a sample pauses, given how many there are: of the logarithm of
    a sample's likelihood, the derivative with respect to an entry's share is how many of its stalls
    are that entry, over the share.
    """
    kept, share = chunk.decision.kept, np.asarray(run.plan.tables.stall_shares, np.float64)
    stalls = np.array([stratum.stalls for stratum in run.program.strata])[kept.stratum]
    needed = np.flatnonzero((stalls > 0) & (of_samples != 0).any(axis=0))

    def inputs(first, count):
        some = needed[first : first + count]
        return kept.ids[some], stalls[some].astype(np.int32)

    counts = np.zeros((len(share), len(of_samples)))
    shared = (run.plan, run.key)
    for batch in tiles(_entries_tile, shared, len(needed), inputs, per_batch=STEP_TILES):
        entries = batch.samples()
        sample, stall = np.nonzero(entries >= 0)
        np.add.at(counts, entries[sample, stall], of_samples.T[needed[batch.first + sample]])
    return np.where(share > 0, counts.T / np.where(share > 0, share, 1), 0)


def _entries_tile(shared, _, ids, stalls):
    plan, key = shared
    return stall_entries(plan, ids, stalls, key).T
