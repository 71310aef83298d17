"""Layouts: which there are, and which is best."""

import concurrent.futures as cf
import itertools as it
import json
import pickle
import re
import subprocess
import sys
from typing import Any

import jax
import msgspec
import numpy as np
import pytest

import prism_jax as prism
from prism_jax import _progress
from prism_jax.cli import main
from prism_jax.layouts._enumerate import schedule_of
from prism_jax.layouts._rank import simulate_jobs
from prism_jax.layouts._search import Search, works_of
from prism_jax.prediction import least_bytes, least_seconds

from .helpers import refusal


_JOB = prism.load_job("megatron-22b-a100-8", ["cluster.num_nodes=4"])
_SMALL = prism.LayoutSpace(
    tp=(4, 8), pp=(2,), virtual_stages=(2,), cp=(1,), microbatch_size=(1, 2), zero=(1,)
)


def _enumerate(world_size=16, *, job=_JOB, **changes):
    options: dict = {"training": job.training, "batch_size": 16, "space": _SMALL}
    options["kernels"] = job.kernels
    assert job.cluster is not None
    assert job.model is not None
    return prism.enumerate_layouts(job.model, job.cluster, world_size, **(options | changes))


@pytest.fixture(scope="module")
def jobs():
    return _enumerate()


def test_all_divisors_are_tried():
    """Of a batch that is odd for each replica, only microbatches of one sequence were."""
    changes = ["model.modules.moe.num_experts=96", "training.sequence_length=6144"]
    space = prism.LayoutSpace(tp=(1,), pp=(1,), zero=(3,), recompute=("full",))
    options = {"batch_size": 24 * 15, "space": space, "any_memory": True}
    listed = _enumerate(24, job=prism.load_job("qwen3-235b-h100-256", changes), **options)
    assert {one.layout.cp for one in listed} == {1, 2, 3, 4, 6, 8}
    assert {one.layout.ep for one in listed} == {1, 2, 3, 4, 6, 8, 12, 24}
    alone = [one.training for one in listed if one.layout.cp == 1]
    assert {one.microbatch_size for one in alone if one is not None} == {1, 3, 5}


def test_layouts_divide_fit_and_come_in_order(jobs):
    names = [job.name for job in jobs]
    assert len(set(names)) == len(names) > 6
    keys = []
    for job in jobs:
        layout, schedule, training = job.layout, job.schedule, job.training
        assert layout.world_size == 16
        assert layout.dp * schedule.num_microbatches * training.microbatch_size == 16
        assert (schedule.kind == "interleaved-1f1b") == (schedule.virtual_stages > 1)
        assert prism.memory(job).fits
        assert prism.predict(job).mean > 0
        order = (layout.tp, layout.pp, schedule.virtual_stages, layout.cp, layout.ep)
        keys.append((*order, training.microbatch_size, training.zero, training.recompute == "full"))
    assert keys == sorted(keys)


def test_no_layout_is_missed():
    """Those of one schedule, found by trying every combination of small degrees."""
    space = prism.LayoutSpace(schedule=("1f1b",), microbatch_size=(1, 2), cp=(1, 2), zero=(1,))
    found = {job.name for job in _enumerate(8, space=space, batch_size=8)}
    count = 0
    for tp, pp, dp, cp, size in it.product(
        (1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8), (1, 2), (1, 2)
    ):
        if tp * pp * dp * cp != 8 or 8 % (dp * size):
            continue
        schedule = prism.data.ScheduleConfig("1f1b", 8 // (dp * size))
        for recompute in ("none", "full"):
            assert _JOB.training is not None
            training = msgspec.structs.replace(
                _JOB.training, microbatch_size=size, zero=1, recompute=recompute
            )
            job = msgspec.structs.replace(
                _JOB,
                layout=prism.Layout(tp=tp, pp=pp, dp=dp, cp=cp),
                schedule=schedule,
                training=training,
                world_size=None,
            )
            count += prism.memory(job).fits
    assert len(found) == count > 0


def test_experts_are_dealt_and_stages_of_uneven_layers():
    job = prism.load_job("megatron-22b-a100-8", ["model=mixtral-8x7b", "num_nodes=2"])
    space = prism.LayoutSpace(tp=(1,), pp=(1,), cp=(1,), zero=(1,), recompute=("none",))
    found = _enumerate(16, job=job, space=space, any_memory=True)
    assert {one.layout.ep for one in found} == {1, 2, 4, 8}
    large = prism.load_job("llama-3.1-405b-h100-65536")
    space = prism.LayoutSpace(tp=(8,), pp=(16,), cp=(1,), zero=(1,), recompute=("none",))
    of = _enumerate(16384, job=large, space=space, batch_size=2048, any_memory=True)
    # 126 layers, with the embedding and the head; eight would be 128 stages.
    assert {one.schedule.virtual_stages for one in of} == {1, 2, 4}
    assert all(one.schedule.head_counts_as_layer for one in of)


def test_microbatches_are_all_small_ones_and_powers_of_two_that_divide_the_batch_of_a_replica():
    space = prism.LayoutSpace(tp=(4,), pp=(2,), cp=(1,), zero=(1,), schedule=("1f1b",))
    for batch in (16, 48):
        of = _enumerate(16, space=space, batch_size=batch, any_memory=True)
        sizes = {one.training.microbatch_size for one in of if one.training}
        tried = {1, 2, 3, 4, 5, 6, 7, 8, *(2**i for i in range(10))}
        assert sizes == {size for size in tried if batch // 2 % size == 0}


def test_no_layout_has_more_stages_than_layers():
    job = prism.load_job("megatron-22b-a100-8", ["num_nodes=2"])  # 48 layers.
    space = prism.LayoutSpace(tp=(8,), cp=(1,), zero=(1,), recompute=("none",))
    of = _enumerate(16, job=job, space=space, any_memory=True)
    assert max(one.layout.pp * one.schedule.virtual_stages for one in of) == 48


@pytest.mark.parametrize("batch_size", [12, 2_520_000])
def test_layouts_of_a_million_gpus_are_found_among_divisors(batch_size, monkeypatch):
    """Nothing is done for each number of GPUs: what is looked at is bounded by the model."""
    looks = []
    monkeypatch.setattr(
        "prism_jax.layouts._space._dividing",
        lambda choices, number: (
            looks.append(len(choices)) or [i for i in choices if number % i == 0]
        ),
    )
    job = prism.load_job("megatron-22b-a100-8", ["cluster.num_nodes=125000"])
    space = prism.LayoutSpace(microbatch_size=(1,), zero=(1,), recompute=("none",))
    asked = {"job": job, "space": space, "batch_size": batch_size, "any_memory": True}
    if batch_size == 12:
        with pytest.raises(ValueError, match="No layout of the space divides 1,000,000 GPUs"):
            _enumerate(1_000_000, **asked)
    else:
        assert _enumerate(1_000_000, **asked)
    assert max(looks) <= 48  # Layers.


def test_numbers_of_gpus_near_one_that_nothing_divides_are_named():
    with pytest.raises(ValueError, match="No layout of the space divides 13 GPUs") as error:
        _enumerate(13)
    near = [int(n) for n in re.findall(r"\d+", str(error.value).partition("evenly; use")[2])]
    assert len(near) == 2
    assert all(_enumerate(number, any_memory=True) for number in near)


def test_a_too_large_model_names_the_gpus_that_would_hold_it():
    space = prism.LayoutSpace(cp=(1,), microbatch_size=(1,), zero=(1,))
    job = prism.load_job("megatron-22b-a100-8", ["model=llama-3.1-405b", "num_nodes=64"])
    asked = {"job": job, "space": space, "batch_size": 64}
    refusal(lambda: _enumerate(64, **asked), "` ... ` needs least, ... GiB; use 128 GPUs, or")
    assert _enumerate(128, **asked)


def test_a_batch_of_very_many_microbatches_that_cannot_fit_is_refused_at_once(monkeypatch):
    """Only layouts of enough GPUs are looked at together with the ops of their schedules."""
    job, asked, of = prism.load_job("llama-3.1-405b-h100-65536"), [], prism.memory

    def memory(one):
        asked.append(one)
        return of(one)

    monkeypatch.setattr("prism_jax.prediction._memory.memory", memory)
    with pytest.raises(ValueError, match=r"without activations, .* GiB; use 128 GPUs, or"):
        _enumerate(8, job=job, space=None, batch_size=2_048)
    assert {one.layout.world_size for one in asked} == {128}


@pytest.mark.parametrize("model", ["megatron-22b", "deepseek-v2"])
def test_no_layout_needs_less_than_its_parameters_do(model):
    job = prism.load_job("megatron-22b-a100-8", ["num_nodes=8", f"model={model}"])
    space = prism.LayoutSpace(
        tp=(1, 4), cp=(1,), microbatch_size=(1,), zero=(0, 1, 3), recompute=("full",)
    )
    asked = {"job": job, "space": space, "batch_size": 64}
    every = _enumerate(32, any_memory=True, **asked)
    needed = [prism.memory(one) for one in every]
    for one, found in zip(every, needed, strict=True):
        assert 0 < least_bytes(one) < found.fullest.bytes
    fitting = [one.name for one, found in zip(every, needed, strict=True) if found.fits]
    if fitting:
        assert fitting == [one.name for one in _enumerate(32, **asked)]


def _rigged(monkeypatch, figures):
    """Makes the figures of simulated jobs those of a function: objective, mean and std."""

    def simulate(jobs, *options):
        rows = []
        for job in jobs:
            objective, mean, std = figures(job)
            values = np.array([objective, mean, mean, mean, std])
            rows.append(
                prism.analysis.Jackknifed(values, values + np.zeros((3, 1)), np.full(5, 1e9))
            )
        return rows

    monkeypatch.setattr("prism_jax.workers._tasks._packed", lambda of, task: lambda: of(*task))
    monkeypatch.setattr("prism_jax.layouts._rank.simulate_jobs", simulate)


_RIGGED: Any = {"num_samples": 1024, "key": jax.random.key(0)}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("objective", [prism.Mean(), prism.Quantile(0.1)])
def test_no_prediction_hides_the_best_layout(jobs, objective, seed, monkeypatch):
    """With predictions above the means of their own steps, as those of jobs with a capacity factor
    were, and with quantiles far below the mean: the first are those of brute force.
    """
    jobs, random, known = jobs[:6], np.random.default_rng(seed), {}
    mean = isinstance(objective, prism.Mean)
    reach = 1.0 if mean else np.sqrt((1 - objective.q) / objective.q)

    def figures(job):
        if job.name not in known:
            share = random.uniform(0.7, 0.95) if mean else random.uniform(1.0, 1.01)
            value = prism.predict(job).mean * share
            std = 0.1 * value
            known[job.name] = (value - reach * (not mean) * random.uniform(0, std), value, std)
        return known[job.name]

    _rigged(monkeypatch, figures)
    for top in (1, 3):
        found = prism.rank_layouts(jobs, objective, top=top, **_RIGGED)
        every = sorted(jobs, key=lambda job: figures(job)[0])
        assert [one.job for one in found.layouts[:top]] == every[:top]
        assert any("so predictions leave none" in note for note in found.notes) == mean
        with cf.ThreadPoolExecutor(1) as executor:
            assert (
                prism.rank_layouts(jobs, objective, top=top, executor=executor, **_RIGGED) == found
            )


@pytest.mark.slow
def test_the_first_of_layouts_with_a_capacity_factor_is_that_of_brute_force():
    """Its tokens are dropped in other numbers by each degree of expert parallelism."""
    moe = [f"model.modules.moe.{key}" for key in ("capacity_factor=1", "load_concentration=60")]
    changes = ["model=qwen3-30b-a3b", "cluster=dgx-h100", "num_nodes=2", "layout.tp=1"]
    job = prism.load_job("megatron-22b-a100-8", [*changes, "training.dtype=bf16", *moe])
    space = prism.LayoutSpace(
        tp=(1,),
        pp=(1,),
        cp=(1,),
        ep=(1, 2, 4),
        microbatch_size=(4,),
        zero=(1,),
        recompute=("none",),
    )
    asked = {"job": job, "space": space, "batch_size": 64, "any_memory": True}
    jobs, options = _enumerate(16, **asked), {"num_samples": 512, "key": jax.random.key(0)}
    every = prism.rank_layouts(jobs, prism.Mean(), top=len(jobs), **options)
    assert all(one.prediction.mean < one.mean.value for one in every.layouts)
    found = prism.rank_layouts(jobs, prism.Mean(), top=1, **options)
    assert found.num_simulated < every.num_simulated == 3
    assert found.best.job == every.best.job


def test_a_bound_that_holds_leaves_layouts_out(jobs, monkeypatch):
    of = {job.name: prism.predict(job).mean for job in jobs}
    _rigged(monkeypatch, lambda job: (1.03 * of[job.name], 1.01 * of[job.name], 0.01))
    found = prism.rank_layouts(jobs, prism.CVaR(0.9), top=1, **_RIGGED)
    near = sum(s < 1.03 * min(of.values()) for s in of.values())
    assert found.num_simulated == near < len(jobs)


def test_your_job_is_ranked_wherever_it_stands(jobs, monkeypatch):
    of = {job.name: prism.predict(job).mean for job in jobs}
    slow = max(jobs, key=lambda job: of[job.name])
    yours = msgspec.structs.replace(slow, name="mine")
    by_mean = prism.rank_layouts(jobs, num_samples=None, top=2, yours=yours, memory_margin=0.0)
    _rigged(monkeypatch, lambda job: (1.01 * prism.predict(job).mean,) * 2 + (0.0,))
    simulated = prism.rank_layouts(jobs, top=2, yours=yours, **_RIGGED)
    for found, scale in ((by_mean, 1.0), (simulated, 1.01)):
        assert found.num_given == len(jobs)  # It is one of them.
        assert found.yours is found.layouts[-1]
        assert found.yours.job is slow
        assert found.yours.rank == len(found.layouts) > 2
        behind = scale * (of[slow.name] - min(of.values()))
        assert found.yours.behind.value == pytest.approx(behind)
    # One that is no layout of the space is another candidate.
    schedule = msgspec.structs.replace(slow.schedule, kind="gpipe", virtual_stages=1)
    other = msgspec.structs.replace(slow, schedule=schedule)
    found = prism.rank_layouts(jobs, top=len(jobs), yours=other, **_RIGGED)
    assert found.num_given == found.num_simulated == len(jobs) + 1
    shorter = sum(one < prism.predict(other).mean for one in of.values())
    assert found.yours is found.layouts[shorter]
    # And one that does not fit is not ranked.
    training = msgspec.structs.replace(slow.training, microbatch_size=4096)
    large = msgspec.structs.replace(slow, training=training)
    found = prism.rank_layouts(jobs, num_samples=None, top=2, yours=large, memory_margin=0.0)
    assert found.yours is None
    assert any(re.search(r"not ranked: it needs .* GiB", note) for note in found.notes)


@pytest.fixture(scope="module")
def exhaustive(jobs):
    return prism.rank_layouts(jobs, num_samples=4096, key=jax.random.key(0), top=len(jobs))


@pytest.mark.slow
def test_the_winner_is_that_of_all(jobs, exhaustive):
    few = prism.rank_layouts(jobs, num_samples=4096, key=jax.random.key(0), top=3)
    assert few.num_given == exhaustive.num_simulated == len(jobs)
    assert few.num_simulated < len(jobs)
    names = [[one.job.name for one in found.layouts[:3]] for found in (few, exhaustive)]
    assert names[0] == names[1]
    # The same random numbers: the figures are the same.
    for one, other in zip(few.layouts[:3], exhaustive.layouts[:3], strict=True):
        assert one.value == other.value
        assert one.behind == other.behind


@pytest.mark.slow
def test_a_step_that_varies_is_longer_than_predicted(exhaustive):
    """By which layouts are left out."""
    for one in exhaustive.layouts:
        assert one.prediction.mean < one.mean.value < one.p95.value < one.p99.value


@pytest.mark.slow
def test_ranks_differences_and_losses_belong_together(exhaustive):
    layouts = exhaustive.layouts
    assert [one.rank for one in layouts] == [*range(1, len(layouts) + 1)]
    assert sorted(one.rank_by_mean for one in layouts) == [one.rank for one in layouts]
    values = [one.value.value for one in layouts]
    assert values == sorted(values) == [one.p95.value for one in layouts]
    assert exhaustive.best.behind.value == exhaustive.best.behind.standard_error == 0
    for one in layouts[1:]:
        assert one.behind.value == pytest.approx(one.value.value - values[0])
    assert exhaustive.loss == exhaustive.best_by_mean.behind
    table = exhaustive.table()
    assert table["rank by mean"].to_list() == [one.rank_by_mean for one in layouts]
    assert table["p95 [s]"].to_list() == values
    # Common random numbers: differences are better known than the figures.
    apart = [np.hypot(one.p95.standard_error, layouts[0].p95.standard_error) for one in layouts[1:]]
    assert np.median([one.behind.standard_error for one in layouts[1:]] / np.array(apart)) < 1


@pytest.mark.slow
def test_jobs_go_to_another_process(jobs):
    task = (jobs[:2], prism.Mean(), 1024, jax.random.key(0))
    again = pickle.loads(pickle.dumps(task))
    for one, other in zip(simulate_jobs(*task), simulate_jobs(*again), strict=True):
        assert not isinstance(one, str)
        assert not isinstance(other, str)
        np.testing.assert_array_equal(one.without, other.without)


def test_rankings_are_the_same_by_any_executor(jobs):
    options = {"num_samples": 4096, "key": jax.random.key(0), "top": 2}
    alone = prism.rank_layouts(jobs[:5], **options)
    with cf.ThreadPoolExecutor(2) as executor:
        shared = prism.rank_layouts(jobs[:5], executor=executor, **options)
    assert shared == alone


class _Dead(cf.Executor):
    """An executor whose workers are dead."""

    def submit(self, fn, /, *args, **kwargs):
        raise cf.BrokenExecutor

    def shutdown(self, wait=True, *, cancel_futures=False):
        pass


def test_an_executor_that_dies_is_one_sentence(jobs, monkeypatch, capsys):
    with pytest.raises(cf.BrokenExecutor, match="A worker died before its task was done"):
        prism.rank_layouts(jobs[:1], num_samples=1024, key=jax.random.key(0), executor=_Dead())
    monkeypatch.setattr("prism_jax.workers.RayExecutor", lambda *_, **__: _Dead())
    words = ["layouts", "megatron-22b-a100-8", "--gpus", "16", *_CHOOSE, "--samples", "1024"]
    assert main([*words, "--ray"]) == 1
    error = capsys.readouterr().err
    assert "A worker died before its task was done" in error
    assert "Traceback" not in error


def test_jobs_that_cannot_run_are_told(jobs):
    bad = msgspec.structs.replace(jobs[0], layout=prism.Layout(tp=5, dp=3))
    with pytest.raises(ValueError, match=r"None of the jobs can be simulated: .*tp"):
        prism.rank_layouts([bad], key=jax.random.key(0))


_CHOOSE = [f"--choose={one}" for one in ("tp=8", "pp=2", "cp=1", "zero=1", "microbatch_size=1")]


@pytest.mark.slow
def test_the_commands_print_rankings(answered, capsys):
    common = ["--samples", "2048", "--json"]
    assert main(["layouts", "megatron-22b-a100-8", "--gpus", "16", *_CHOOSE, *common]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    (found,) = json.loads(printed.out)["searches"]
    best = found["layouts"][0]
    assert best["rank"] == 1
    assert best["gpus"] == 16
    assert best["behind"]["value"] == 0
    assert best["p95"]["value"] == best["value"]["value"]
    words = ["compare", "megatron-22b-a100-8", "--over", "layout.dp=1,2", "--samples", "2048"]
    text = answered([*words, "--set", "num_nodes=4", "--set", "layout.pp=2"])
    assert text.index("dp=2") < text.index("dp=1")  # A longer step of twice the tokens.
    assert "The best is also the best by mean." in text
    assert "The jobs have 16, 32 GPUs" in text
    assert "so the jobs are ranked by their time per token, not per step" in text


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("model", ["megatron-22b", "deepseek-v2"])
def test_no_step_is_shorter_than_its_work(model, zero):
    job = prism.load_job("megatron-22b-a100-8", ["num_nodes=8", f"model={model}"])
    kinds = ("1f1b", "interleaved-1f1b", "gpipe", "zb-h1", "dual-pipe", "overlapped-1f1b", "zbv")
    space = prism.LayoutSpace(
        tp=(1, 4), pp=(1, 2, 4), cp=(1, 2), microbatch_size=(2,), zero=(zero,), schedule=kinds
    )
    of = _enumerate(32, job=job, space=space, batch_size=64, any_memory=True)
    known, above = {}, []
    for one in of[:: max(len(of) // 60, 1)]:
        least, closer = (least_seconds(one, known, sharded=sharded) for sharded in (False, True))
        try:
            mean = prism.predict(one).mean
        except ValueError:
            continue
        assert 0 < least <= mean * (1 + 1e-9), one.name
        assert closer <= mean * (1 + 1e-9), one.name
        above.append(mean / max(least, closer))
    assert min(above) < 1.3  # Not far below.


def test_layouts_come_by_prediction_and_few_are_predicted(jobs):
    by_mean = sorted((prism.predict(job).mean, job.name) for job in jobs)
    every = prism.rank_layouts(jobs, num_samples=None, top=len(jobs), memory_margin=0.0)
    assert [one.job.name for one in every.layouts] == [name for _, name in by_mean]
    assert not every.notes
    few = prism.rank_layouts(
        _enumerate(any_memory=True), num_samples=None, top=2, memory_margin=0.3
    )
    tight = [one for one in jobs if prism.memory(one).fullest.bytes < 0.7 * 80e9]
    tight = sorted((prism.predict(one).mean, one.name) for one in tight)
    assert [one.job.name for one in few.layouts] == [name for _, name in tight[:2]]
    assert few.num_samples == 0
    assert few.best.behind.value == 0


def test_a_search_says_at_once_what_is_known_where_nothing_else_does(jobs, monkeypatch, capsys):
    options = {"num_samples": None, "top": 2}
    for of_command in (False, True):  # There, the lines are those of the command.
        began = []
        monkeypatch.setattr(_progress, "_say_it_works", began.append)
        with _progress.said_to_work("`layouts`", of_command):
            prism.rank_layouts(jobs, **options, progress=True)
        (line,) = capsys.readouterr().err.splitlines()
        assert re.search(
            rf"s: \d+ of {len(jobs)} layouts predicted, 0 simulated; best so far: ", line
        )
        assert len(began) == 1
    with _progress.said_to_work("`compare`", True):
        prism.rank_layouts(jobs, **options)
    assert capsys.readouterr().err == ""


def test_what_a_search_says_may_be_asked_while_it_goes_on(jobs):
    search = Search(jobs, *works_of(jobs), prism.Mean(), None, 2, None)
    assert search.progress() == f"0 of {len(jobs)} layouts looked at, none predicted"
    search.predictions |= {1: prism.predict(jobs[1])}
    assert f"1 of {len(jobs)} layouts predicted, 0 simulated" in search.progress()
    assert jobs[1].name in search.progress()


def test_a_longer_budget_only_adds_layouts(jobs, monkeypatch):
    """With a clock that ticks whenever it is read."""
    every = [one.job.name for one in _by_mean(jobs, None).layouts]
    monkeypatch.setattr("prism_jax.layouts._search.time.monotonic", it.count().__next__)
    lengths = []
    for budget in (20, 30, 40, 1000):
        found = _by_mean(jobs, budget)
        assert found.ended == ("budget" if budget < 1000 else "")
        assert {one.job.name for one in found.layouts} <= {*every}
        lengths.append(len(found.layouts))
        assert bool(found.notes) == (budget < 1000)
    assert lengths == sorted(lengths)
    assert lengths[-1] == len(every)
    refusal(lambda: _by_mean(jobs, 1), "budget ended before any layout")


def _by_mean(jobs, budget):
    return prism.rank_layouts(jobs, num_samples=None, top=len(jobs), budget=budget)


class _Killed(BaseException):
    pass


def test_a_search_that_was_killed_goes_on_to_the_same_table(jobs, tmp_path, monkeypatch):
    jobs = [one for one in jobs if schedule_of(one) == schedule_of(jobs[0])]  # Compiled once.
    options: Any = {"num_samples": 1024, "key": jax.random.key(0), "top": 2}
    alone = prism.rank_layouts(jobs, out=tmp_path / "alone", **options)
    simulated = []

    def simulate(jobs, *options):
        if len(simulated) == 1:
            raise _Killed
        simulated.extend(jobs)
        return simulate_jobs(jobs, *options)

    monkeypatch.setattr(
        "prism_jax.workers._tasks._packed", lambda function, task: lambda: function(*task)
    )
    monkeypatch.setattr("prism_jax.layouts._rank.simulate_jobs", simulate)
    with pytest.raises(_Killed):
        prism.rank_layouts(jobs, out=tmp_path / "killed", **options)
    monkeypatch.undo()
    assert len([*(tmp_path / "killed").glob("part-*")]) == 1
    again = prism.rank_layouts(jobs, out=tmp_path / "killed", **options)
    assert str(again) == str(alone)  # Unknown errors, `nan`, equal nothing.
    names = [
        sorted(path.name for path in (tmp_path / one).iterdir()) for one in ("killed", "alone")
    ]
    assert names[0] == names[1]
    for name in names[0]:
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "alone" / name).read_bytes()
    # More layouts go into the same folder, other samples do not.
    more = prism.rank_layouts(jobs, out=tmp_path / "killed", **(options | {"top": 3}))
    assert {one.job.name for one in more.layouts} >= {one.job.name for one in alone.layouts}
    with pytest.raises(ValueError, match="holds another search"):
        prism.rank_layouts(jobs, out=tmp_path / "killed", **(options | {"num_samples": 2048}))


def test_ctrl_c_leaves_the_layouts_ranked_so_far(jobs, monkeypatch, ctrl_c):
    add = Search.add

    def interrupted(search, number, found):
        add(search, number, found)
        ctrl_c()

    monkeypatch.setattr(Search, "add", interrupted)
    found = prism.rank_layouts(jobs[:6], num_samples=1024, key=jax.random.key(0), top=6)
    assert found.ended == "interrupted"
    assert found.num_simulated == len(found.layouts) == 1
    assert "ended (interrupted): 5 layouts left out" in found.notes[0]


def test_by_mean_starts_no_jax():
    words = ["layouts", "megatron-22b-a100-8", "--gpus", "16", *_CHOOSE, "--by", "mean", "--json"]
    code = (
        f"from prism_jax.cli import main; main({words})\n"
        "from jax._src import xla_bridge; assert not xla_bridge.backends_are_initialized()"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "")
    (found,) = json.loads(ran.stdout)["searches"]
    assert found["num_simulated"] == 0
    assert found["layouts"][0]["p95"]["value"] is None


def test_times_are_compared_per_token_or_sample():
    changes = ["num_nodes=4", "layout.tp=4"]
    two = [prism.load_job("megatron-22b-a100-8", [*changes, f"layout.dp={dp}"]) for dp in (2, 4)]
    options: Any = {"num_samples": 1024, "key": jax.random.key(0), "top": 2}
    found = prism.rank_layouts(two, prism.Mean(), **options)
    best, other = found.layouts
    assert found.unit == "token"
    assert best.job.layout.dp == 4
    assert best.value.value > other.value.value
    for one in (best, other):
        assert one.per_unit * one.job.tokens_per_step == pytest.approx(one.value.value)
    behind = (other.per_unit - best.per_unit) * two[0].tokens_per_step
    assert other.behind.value == pytest.approx(behind)
    images = prism.load_job("dit-xl-2-a100-8")
    more = prism.load_job("dit-xl-2-a100-8", ["schedule.num_microbatches=2"])
    by_sample = prism.rank_layouts([images, more], num_samples=None)
    assert by_sample.unit == "sample"


def test_the_command_says_where_your_job_stands(answered, capsys):
    words = ["layouts", "megatron-22b-a100-8", "--gpus", "8", "--by", "mean", "--top", "1"]
    words += [f"--choose={one}" for one in ("tp=8", "pp=1", "zero=1", "recompute=selective")]
    words += ["--set", "training.recompute=full"]
    (found,) = answered([*words, "--json"])["searches"]
    job = prism.load_job("megatron-22b-a100-8", ["training.recompute=full"])
    best = found["layouts"][0]["predicted_s"]
    behind = prism.predict(job).mean - best
    assert found["yours"] == {"rank": 2, "behind_s": pytest.approx(behind)}
    assert main(words) == 0
    said = f"yours: rank 2 of the 2 ranked, {behind:.2g} s ({100 * behind / best:.2g} %) behind"
    assert said in capsys.readouterr().out
    (found,) = answered([*words, "--json", "--batch", "2"])["searches"]
    assert found["yours"] is None


def test_selective_is_what_the_stack_calls_so():
    keys = ["training.software=torchtitan", "training.zero=1", "training.recompute=selective"]
    job = prism.load_job("megatron-22b-a100-8", keys)
    one = prism.LayoutSpace(tp=(8,), cp=(1,), pp=(1,), microbatch_size=(4,), zero=(1,))
    space = msgspec.structs.replace(one, recompute=("selective", "by-op"))
    (same,) = _enumerate(8, job=job, batch_size=4, space=space)
    assert same.training == job.training


def test_gpu_hours_and_cost_follow_from_tokens(answered, refused):
    words = ["layouts", "megatron-22b-a100-8", "--gpus", "16", *_CHOOSE, "--by", "mean", "--json"]
    (found,) = answered([*words, "--tokens", "3e9", "--price", "2"])["searches"]
    for one in found["layouts"]:
        assert one["gpu_hours"] == pytest.approx(16 * 3e9 / one["tokens_per_s"] / 3600)
        assert one["cost"] == 2 * one["gpu_hours"]
    assert "give `--tokens`, too" in refused([*words, "--price", "2"])
