"""Derivatives through the weights of samples: by the rates of stalls, and by the network."""

from collections.abc import Sequence

import equinox as eqx
import jax.numpy as jnp
import numpy as np

from ..replica import stall_entries, tiles
from ..step import STEP_TILES, Selection, VectorRule
from ._prepare import Run
from ._run import Stretch


def through_weights(
    run: Run, stretch: Stretch, selections: Sequence[Selection], influence, of_tables
):
    """Through how likely stalls of each kind, and a congested network, are.

    **Arguments:**

    - `selections`: those of the stretch, or the same with new weights of samples.
    """
    decision = stretch.decision
    assert isinstance(decision, VectorRule)
    if len(run.program.strata) == 1:
        return of_tables
    of_stratum = np.zeros(len(run.program.strata))
    of_regime = np.zeros(len(run.chances.network))
    of_samples = np.zeros(len(decision.kept.ids))
    regimes, position = decision.picks(0, stretch.steps)
    for g, selection in enumerate(selections):
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
    of_counts = np.bincount(stalls, of_stratum, len(of_tables.stall_counts))
    likely = np.asarray(run.plan.tables.stall_counts, np.float64)
    of_counts = np.where(likely > 0, of_counts / np.where(likely > 0, likely, 1), 0)
    totals = (of_tables.stall_counts + of_counts, of_tables.network + of_regime)
    of_tables = eqx.tree_at(lambda t: (t.stall_counts, t.network), of_tables, totals)
    return _through_entries(run, stretch, of_samples, of_tables)


def _through_entries(run: Run, stretch: Stretch, of_samples, of_tables):
    """Through which op each stall of a sample pauses, given how many there are: of the logarithm of
    a sample's likelihood, the derivative with respect to an entry's share is how many of its stalls
    are that entry, over the share.
    """
    shares, kept = run.plan.tables.stall_shares, stretch.decision.kept
    if shares is None:
        return of_tables
    stalls = np.array([stratum.stalls for stratum in run.program.strata])[kept.stratum]
    needed = np.flatnonzero((stalls > 0) & (of_samples != 0))

    def inputs(first, count):
        some = needed[first : first + count]
        return kept.ids[some], stalls[some].astype(np.int32)

    counts = np.zeros(len(shares))
    for batch in tiles(
        _entries_tile, (run.plan, run.key), len(needed), inputs, per_batch=STEP_TILES
    ):
        entries = batch.samples()
        weight = of_samples[needed[batch.first : batch.first + batch.count], None]
        there = entries >= 0
        weight = np.broadcast_to(weight, entries.shape)[there]
        counts += np.bincount(entries[there], weight, len(counts))
    share = np.asarray(shares, np.float64)
    of_shares = np.where(share > 0, counts / np.where(share > 0, share, 1), 0)
    return eqx.tree_at(lambda t: t.stall_shares, of_tables, of_tables.stall_shares + of_shares)


def _entries_tile(shared, _, ids, stalls):
    plan, key = shared
    return jnp.stack(stall_entries(plan, ids, stalls, key), axis=1)
