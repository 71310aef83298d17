"""Derivatives through the weights of samples: by the rates of stalls, and by the network."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from ..replica import Tables, stall_entries, tiles
from ..step import STEP_TILES, AbstractDecision, VectorRule
from ._prepare import Run
from ._run import Stretch


def through_weights(
    run: Run,
    stretch: Stretch,
    decisions: Sequence[AbstractDecision],
    influences: Sequence[np.ndarray],
    sums: Tables,
) -> None:
    """Through how likely stalls of each kind, and a congested network, are: adds to the derivatives
    of figures with respect to tables.

    **Arguments:**

    - `decisions`: for each figure, that of the stretch, or the same with new weights of samples.
    - `influences`: for each figure, as in [`Weighting`][].
    """
    if len(run.program.strata) == 1:
        return
    of_samples = np.zeros((len(influences), len(stretch.decision.kept.ids)))
    for f, (mine, influence) in enumerate(zip(decisions, influences, strict=True)):
        of_counts, of_regime, of_samples[f] = _of_figure(run, mine, influence)
        sums.stall_counts[f] += of_counts
        sums.network[f] += of_regime
    if sums.stall_shares is not None:
        sums.stall_shares[:] += _through_entries(run, stretch, of_samples)


def _of_figure(run: Run, decision: AbstractDecision, influence: np.ndarray):
    """The derivatives of a figure with respect to the probabilities of each number of stalls and of
    each regime, and to the logarithm of the weight of each sample.
    """
    assert isinstance(decision, VectorRule)
    of_stratum = np.zeros(len(run.program.strata))
    of_regime = np.zeros(len(run.chances.network))
    of_samples = np.zeros(len(decision.kept.ids))
    regimes, position = decision.picks(0, len(influence))
    for g, selection in enumerate(decision.selections):
        members = regimes == g
        if not members.any():
            continue
        of_regime[g] += influence[members].sum() / decision.deal.probabilities[g]
        total = np.bincount(position[members], influence[members], len(selection.order))
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


def _through_entries(run: Run, stretch: Stretch, of_samples: np.ndarray) -> np.ndarray:
    """Through which op each stall of a sample pauses, given how many there are: of the logarithm of
    a sample's likelihood, the derivative with respect to an entry's share is how many of its stalls
    are that entry, over the share.
    """
    kept, share = stretch.decision.kept, np.asarray(run.plan.tables.stall_shares, np.float64)
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
    return jnp.stack(stall_entries(plan, ids, stalls, key), axis=1)
