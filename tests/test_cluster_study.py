"""The study of a cluster in `examples/`, with laws of durations that are made up."""

import dataclasses
import math

import numpy as np
import pytest


pytest.importorskip("simpy", reason="simpy is not installed")

from examples.cluster_study import (
    FIGURES,
    Job,
    Kind,
    draw_jobs,
    figures,
    mean,
    quantile,
    simulate,
    study,
)

from .helpers import refusal


LONGEST = quantile(1.0)
_RNG = np.random.default_rng(0)
KINDS = tuple(
    Kind(nodes, np.sort(days * _RNG.lognormal(0.0, 0.5, 500)), share)
    for nodes, days, share in ((1, 1.0, 0.5), (3, 2.0, 0.3), (8, 4.0, 0.2))
)
CERTAIN = tuple(dataclasses.replace(kind, days=kind.days[:1]) for kind in KINDS)


def schedule(outcomes):
    return [(one.start, one.end, one.reserved) for one in outcomes]


@pytest.mark.parametrize("q", [-0.1, 1.1, 95, math.nan])
def test_a_quantile_is_of_a_share(q):
    refusal(lambda: quantile(q), "must be a share from 0 to 1")
    assert [quantile(q)(np.arange(5.0)) for q in (0.0, 0.5, 1.0)] == [0.0, 2.0, 4.0]


def test_certain_durations_give_one_schedule_by_any_estimate():
    jobs = draw_jobs(CERTAIN, 10, 0, number=200, load=0.9, slack=(1.0, 4.0))
    by_mean = schedule(simulate(jobs, 10, mean))
    assert by_mean == schedule(simulate(jobs, 10, quantile(0.95)))
    # What was removed never starts, and nothing that is known to the day ends late.
    assert 0 < sum(start == math.inf for start, _, _ in by_mean) < 200
    ends = [end for _, end, _ in by_mean if end < math.inf]
    deadlines = [
        job.deadline for job, (start, *_) in zip(jobs, by_mean, strict=True) if start < math.inf
    ]
    assert np.all(np.array(ends) <= np.array(deadlines) + 1e-9)


def test_a_job_alone_starts_when_it_arrives_and_ends_after_its_days():
    (found,) = simulate([Job(KINDS[2], 3.0, 5.0)], 8, mean)
    assert (found.start, found.end) == (3.0, 8.0)
    assert figures([found], 8) == [5.0, 1.0, 1.0, 0.0, 0.0]


def test_easy_fills_holes_before_the_reservation_and_not_beyond_it():
    """On four nodes, three of which are taken for ten days, the second job waits for all four. So
    five days on the free node come first, and twenty do not.
    """
    kinds = [Kind(n, np.array([days])) for n, days in ((3, 10.0), (4, 1.0), (1, 20.0), (1, 5.0))]
    jobs = [Job(kind, 0.0, float(kind.days[0])) for kind in kinds]
    found = simulate(jobs, 4, mean)
    assert [one.start for one in found] == [0.0, 10.0, 11.0, 0.0]
    # Three nodes leave one beside them, which may be taken for longer.
    jobs[1] = Job(Kind(3, np.array([1.0])), 0.0, 1.0)
    assert [one.start for one in simulate(jobs, 4, mean)] == [0.0, 10.0, 0.0, 11.0]


@pytest.mark.parametrize("estimate", [mean, quantile(0.5), LONGEST])
@pytest.mark.parametrize("seed", [0, 1])
def test_no_more_nodes_run_jobs_than_there_are(estimate, seed):
    found = simulate(draw_jobs(KINDS, 10, seed, number=200, load=1.2), 10, estimate)
    changes = [(one.start, one.job.kind.nodes) for one in found]
    changes += [(one.end, -one.job.kind.nodes) for one in found]
    assert np.cumsum([nodes for _, nodes in sorted(changes)]).max() <= 10
    utilisation = figures(found, 10)[FIGURES.index("utilisation")]
    assert 0.5 < utilisation <= 1
    assert all(one.start >= one.job.arrival for one in found)


def test_upper_bounds_never_delay_the_first_of_the_queue():
    jobs = draw_jobs(KINDS, 10, 0, number=300, load=1.0)
    late = {
        name: [one.start - one.reserved for one in simulate(jobs, 10, estimate)]
        for name, estimate in (("bound", LONGEST), ("mean", mean))
    }
    assert sum(np.isfinite(late["bound"])) > 30
    assert max(late["bound"]) <= 1e-9
    assert max(late["mean"]) > 0.1


def test_a_seed_gives_the_same_figures_and_another_seed_others():
    again = [study(KINDS, 10, mean, num_seeds=2, number=60, slack=(1.5, 3.0)) for _ in range(2)]
    np.testing.assert_array_equal(again[0], again[1])
    assert again[0].shape == (2, len(FIGURES))
    assert not np.array_equal(again[0][0], again[0][1])


def test_shares_of_jobs_add_up_and_longer_estimates_remove_more():
    jobs = draw_jobs(KINDS, 10, 0, number=300, slack=(1.1, 2.0))
    removed, late = [], []
    for estimate in (quantile(0.5), LONGEST):
        outcomes = simulate(jobs, 10, estimate)
        *_, one_late, one_removed = figures(outcomes, 10)
        on_time = sum(one.end <= one.job.deadline for one in outcomes) / 300
        assert on_time + one_late + one_removed == pytest.approx(1)
        removed.append(one_removed)
        late.append(one_late)
    assert removed[0] < removed[1]
    assert late[0] > late[1] == 0


def test_a_job_that_is_too_large_is_refused():
    refusal(lambda: simulate([Job(KINDS[2], 0.0, 1.0)], 4, mean), "more than the 4 nodes")
