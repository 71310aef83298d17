"""Layouts: which there are, and which is best."""

import concurrent.futures as cf
import itertools as it
import json
import pickle
import re

import jax
import msgspec
import numpy as np
import pytest

import prism_jax as prism
from prism_jax.cli import main
from prism_jax.layouts._simulate import Chunk, simulate_chunk
from prism_jax.prediction import least_bytes
from prism_jax.random import key_data


_JOB = prism.load_job("megatron-22b-a100-8", ["cluster.num_nodes=4"])
_SMALL = prism.LayoutSpace(
    tp=(4, 8), pp=(2,), virtual_stages=(2,), cp=(1,), microbatch_size=(1, 2), zero=(1,)
)


def _enumerate(world_size=16, *, job=_JOB, **changes):
    options: dict = {"training": job.training, "batch_size": 16, "space": _SMALL}
    options["kernels"] = job.kernels
    assert job.model is not None
    assert job.cluster is not None
    return prism.enumerate_layouts(job.model, job.cluster, world_size, **(options | changes))


@pytest.fixture(scope="module")
def jobs():
    return _enumerate()


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
    # 126 layers, with the embedding and the head.
    assert {one.schedule.virtual_stages for one in of} == {1, 2, 4, 8}
    assert all(one.schedule.head_counts_as_layer for one in of)


def test_numbers_of_gpus_near_one_that_nothing_divides_are_named():
    with pytest.raises(ValueError, match="No layout of the space divides 13 GPUs") as error:
        _enumerate(13)
    near = [int(n) for n in re.findall(r"\d+", str(error.value).partition("evenly; use")[2])]
    assert len(near) == 2
    assert all(_enumerate(number, any_memory=True) for number in near)


@pytest.mark.parametrize(
    ("world_size", "changes", "message"),
    [
        (64, {}, r"more than the 32 devices.*a cluster of 8 nodes"),
        (0, {}, "`world_size=0` must be a whole number"),
        (16, {"batch_size": 0}, "`batch_size=0` must be a whole number"),
        (16, {"space": prism.LayoutSpace(schedule=("2f2b",))}, "No schedule `2f2b`"),
        (16, {"space": prism.LayoutSpace(tp=())}, "no `tp` to choose"),
        (16, {"space": prism.LayoutSpace(zero=(4,))}, "space of layouts cannot be used"),  # pyright: ignore
    ],
)
def test_what_has_no_layout_is_refused(world_size, changes, message):
    with pytest.raises(ValueError, match=message):
        _enumerate(world_size, **changes)


def test_a_model_that_is_too_large_says_what_would_hold_it():
    space = prism.LayoutSpace(cp=(1,), microbatch_size=(1,), zero=(1,))
    job = prism.load_job("megatron-22b-a100-8", ["model=llama-3.1-405b", "num_nodes=64"])
    asked = {"job": job, "space": space, "batch_size": 256}
    with pytest.raises(ValueError, match=r"`.*` needs least, .* GB; use 128 GPUs, or"):
        _enumerate(64, **asked)
    assert _enumerate(128, **asked)


def test_a_batch_of_very_many_microbatches_that_cannot_fit_is_refused_at_once(monkeypatch):
    """Only layouts of enough GPUs are looked at together with the ops of their schedules."""
    job, asked = prism.load_job("llama-3.1-405b-h100-65536"), []

    def memory(one):
        asked.append(one)
        return prism.memory(one)

    monkeypatch.setattr("prism_jax.layouts._enumerate.memory", memory)
    with pytest.raises(ValueError, match=r"without activations, .* GB; use 128 GPUs, or"):
        _enumerate(8, job=job, space=None, batch_size=32_768)
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


@pytest.fixture(scope="module")
def exhaustive(jobs):
    return prism.rank_layouts(
        jobs, num_samples=4096, key=jax.random.key(0), top=len(jobs), margin=None
    )


@pytest.mark.slow
def test_the_winner_is_that_of_all(jobs, exhaustive):
    few = prism.rank_layouts(jobs, num_samples=4096, key=jax.random.key(0), top=3, margin=0.0)
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
def test_a_chunk_goes_to_another_process(jobs):
    words = tuple(int(word) for word in key_data(jax.random.key(0)))
    chunk = Chunk((3,), jobs[:2], prism.Mean(), 1024, words)
    again = pickle.loads(pickle.dumps(chunk))
    for one, other in zip(simulate_chunk(chunk), simulate_chunk(again), strict=True):
        assert not isinstance(one, str)
        assert not isinstance(other, str)
        np.testing.assert_array_equal(one.resampled, other.resampled)


def test_rankings_are_the_same_by_any_executor(jobs):
    options = {"num_samples": 4096, "key": jax.random.key(0), "top": 2, "margin": 0.0}
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"objective": prism.Exceedance(1.0)}, "does not rank layouts"),
        ({"objective": prism.Std()}, "does not rank layouts"),
        ({"jobs": ()}, "no layouts to rank"),
        ({"num_samples": 16}, "num_samples"),
        ({"objective": prism.Quantile(0.9999)}, "do not reach"),
        ({"top": 0}, "`top=0` must be"),
        ({"margin": -1.0}, "`margin=-1.0` must be"),
    ],
)
def test_bad_rankings_are_refused(jobs, changes, message):
    options = {"jobs": jobs, "objective": None, "key": jax.random.key(0)} | changes
    with pytest.raises(ValueError, match=message):
        prism.rank_layouts(options.pop("jobs"), options.pop("objective"), **options)


def test_jobs_that_cannot_run_are_told(jobs):
    bad = msgspec.structs.replace(jobs[0], layout=prism.Layout(tp=5, dp=3))
    with pytest.raises(ValueError, match=r"None of the jobs can be simulated: .*tp"):
        prism.rank_layouts([bad], key=jax.random.key(0))


_CHOOSE = [f"--choose={one}" for one in ("tp=8", "pp=2", "cp=1", "zero=1", "microbatch_size=1")]


@pytest.mark.slow
def test_the_commands_print_rankings(capsys):
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
    assert main([*words, "--set", "num_nodes=4", "--set", "layout.pp=2"]) == 0
    text = capsys.readouterr().out
    assert text.index("dp=1") < text.index("dp=2")
    assert "The best is also the best by mean." in text
    assert "The jobs have 16, 32 GPUs: compare tokens/s" in text
    assert "tokens: compare tokens/s" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["layouts", "megatron-22b-a100-8", "--gpus", "13"], "divides 13 GPUs"),
        (
            ["layouts", "megatron-22b-a100-8", "--gpus", "16", "--objective", "speed"],
            "must be mean",
        ),
        (["layouts", "megatron-22b-a100-8", "--gpus", "16", "--objective", "std"], "does not rank"),
        (["layouts", "megatron-22b-a100-8", "--gpus", "0"], "at least 1"),
        (["layouts", "megatron-22b-a100-8", "--gpus", "8", "--choose", "xp=1"], "No key `xp`"),
        (["layouts", "megatron-22b-a100-8", "--gpus", "8", "--choose", "tp=-1"], "whole numbers"),
        (["layouts", "megatron-22b-a100-8", "--gpus", "8", "--choose", "tp=8,8"], "twice"),
        (["layouts", "megatron-22b-a100-8", "--gpus", "8", "--choose", "zero=5"], "cannot be used"),
        (["layouts", "megatron-22b-a100-8", "--gpus", "8", "--set", "layout.etp=1"], "no effect"),
        (
            ["layouts", "megatron-22b-a100-8", "--gpus", "8", "--ray", "nobody.invalid:6379"],
            "No Ray cluster answers at `nobody.invalid:6379`",
        ),
        (["layouts", "megatron-22b-a100-8", "--gpus", "8", "--worker-gpus", "1"], "give both"),
        (["compare", "megatron-22b-a100-8"], "nothing to compare it with"),
    ],
)
def test_bad_input_is_one_sentence(words, message, capsys):
    if "--ray" in words:
        pytest.importorskip("ray", reason="ray is not installed")
    assert main(words) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
