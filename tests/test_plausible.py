"""What is allowed and probably wrong is said in one line; what is shipped is plausible."""

import pathlib
import re
from typing import Any

import jax
import msgspec
import numpy as np
import polars as pl
import pytest

import prism_jax as prism
from prism_jax.cli import main
from prism_jax.data import Link, job_warnings, list_names, load_cluster
from prism_jax.prediction import idle_keys, throughput

from .helpers import made_law


_JOB, _ONE_NODE = "megatron-175b-a100-64", "megatron-22b-a100-8"
_EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"


@pytest.mark.parametrize("name", list_names("job"))
def test_shipped_jobs_are_plausible(name):
    job = prism.load_job(name)
    assert job_warnings(job) == job.notes
    assert idle_keys(job) == ()


# Each on a job that makes nothing of it, and what else makes it matter.
_MIXTRAL = ("model=mixtral-8x7b", "layout.tp=1", "layout.pp=1", "layout.dp=64", "layout.ep=8")
_MIXTRAL += ("schedule.kind=1f1b", "schedule.virtual_stages=1", "training.dtype=bf16")
_PLAIN = "training.sequence_parallel=false"
_REPLICAS = ("layout.dp=2", "num_nodes=16")


@pytest.mark.parametrize(
    ("change", "more"),
    [
        ("training.token_dispatcher=deepep", _MIXTRAL),
        ("training.prefetch=2", ("training.zero=3", *_REPLICAS)),
        ("training.cp_comm_type=a2a", ("layout.cp=2", "layout.tp=4")),
        ("training.scatter_send_recv=true", (_PLAIN,)),
        (
            "training.recompute_layers=2",
            ("training.recompute=full", "training.gradient_dtype=fp32"),
        ),
        ("layout.etp=2", _MIXTRAL),
    ],
)
def test_a_key_without_effect_is_told(change, more):
    key, _, value = change.partition("=")
    said = idle_keys(prism.load_job(_JOB, [change]))
    (note,) = (one for one in said if one.startswith(f"`{key}` = "))
    assert value in note
    assert len(note) < 300
    assert "\n" not in note
    others = [one for one in idle_keys(prism.load_job(_JOB, [change, *more])) if key in one]
    assert others == []


@pytest.mark.slow
def test_keys_that_are_off_or_of_the_stack_are_not_told(answered, capsys):
    stack = "training.software=megatron-bridge-2025"
    training = prism.load_job(_JOB, [stack]).training
    assert training.token_dispatcher == "hybridep"
    off = ("training.overlap_tp_backward=false", "training.cp_load_balance=false")
    assert idle_keys(prism.load_job(_JOB, [stack, *off])) == ()
    change = ("--set", "training.prefetch=7")
    assert main(["predict", _JOB, *change]) == 0
    assert "`training.prefetch` = 7 has no effect" in capsys.readouterr().err
    assert "`training.prefetch` = 7 has no effect" in answered(["show", _JOB, *change])
    # Among several jobs a key may be for some.
    grid = ("--over", "layout.dp=1,2", "--set", "num_nodes=16")
    assert main(["compare", _JOB, *grid, *change, "--samples", "2000"]) == 0
    assert "has no effect" not in capsys.readouterr().err


def test_a_choice_that_is_the_default_by_another_name_is_not_told():
    job = prism.load_job(_JOB, ["training.attention=flash-2"])
    assert prism.memory(job) == prism.memory(prism.load_job(_JOB, ["training.attention=flash"]))
    assert idle_keys(job) == ()


def test_a_job_that_does_not_fit_its_layout_has_no_such_notes():
    job = prism.load_job(_JOB, ["training.prefetch=7"])
    assert idle_keys(job) != ()
    layout = msgspec.structs.replace(job.layout, tp=7)
    assert idle_keys(msgspec.structs.replace(job, layout=layout)) == ()


def test_shipped_clusters_and_models_are_plausible():
    job = prism.load_job(_JOB)
    for name in list_names("cluster"):
        peaks = load_cluster(name, 1).device.peak_flop_per_s
        dtype = "bf16" if "bf16" in peaks else "fp16"
        changes = [f"cluster={name}", "num_nodes=100", f"training.dtype={dtype}"]
        changed = prism.load_job(_JOB, changes)
        assert job_warnings(changed) == changed.notes, name
    whole = ("layout.pp=1", "layout.dp=8", "schedule.kind=1f1b", "schedule.virtual_stages=1")
    job = prism.load_job(_JOB, whole)  # With one stage, which each number of layers fits.
    for name in list_names("model"):
        assert job_warnings(msgspec.structs.replace(job, model=prism.load_model(name))) == job.notes


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ("cluster.links.infiniband.bandwidth_bytes_per_s=250e9", "if these are bits, give 3.12e"),
        ("cluster.links.infiniband.bandwidth_bytes_per_s=400e9", "is faster than `nvlink` within"),
        ("cluster.links.infiniband.group=32", "joins 32 of the cluster's 64 devices"),
        ("cluster.links.infiniband.name=ethernet", "`ethernet` has no efficiency in the tables"),
        ("model.vocab_size=128000", "has all defaults of GPT .* yet 128,000 words"),
        ("model.num_kv_heads=8", "has all defaults of GPT .* yet grouped heads"),
    ],
)
def test_implausible_values_have_a_note(change, match, answered):
    job = prism.load_job(_JOB, [change])
    said = job_warnings(job)
    assert sum(bool(re.search(match, note)) for note in said) == 1
    assert all(len(note) < 300 and "\n" not in note for note in said)
    assert said[0] in answered(["show", _JOB, "--set", change])


@pytest.mark.parametrize(("factor", "number"), [(0.69, 1), (0.71, 0), (1.49, 0), (1.6, 1)])
def test_a_calibration_that_explains_too_much_is_doubted(factor, number):
    job = prism.load_job(_JOB)
    calibrated = prism.data.Calibrated(source="steps", compute=factor)
    said = job_warnings(msgspec.structs.replace(job, calibrated=calibrated))
    assert len(said) - len(job.notes) == number


@pytest.mark.parametrize(("factor", "unit"), [(1000, "milliseconds"), (1 / 3600, "hours")])
def test_steps_in_another_unit_are_refused(factor, unit, tmp_path, refused):
    """By the commands, and by the functions of Python."""
    path, law = tmp_path / "steps.csv", made_law()
    level = factor * law.quantile(0.5)
    steps = level * (1 + 0.01 * np.random.default_rng(0).normal(size=40))
    with pytest.raises(ValueError, match=f"in seconds, not in .*{unit}"):
        prism.score(law, steps, key=jax.random.key(0))
    job = prism.load_job(_ONE_NODE)
    pl.DataFrame({"step_time_s": factor * prism.predict(job).mean * steps / level}).write_csv(path)
    commands = [["diagnose", "--measured"], ["calibrate", "--out", "new.toml", "--to"]]
    commands += [["score", "--samples", "200", "--against"]] * (factor > 1)
    for command in commands:
        said = refused([command[0], _ONE_NODE, *command[1:], str(path)]).splitlines()[-1]
        assert "steps.csv: the median of the measured steps" in said
        assert unit in said


def test_ops_in_milliseconds_are_noticed(tmp_path, answered):
    path = tmp_path / "ops.csv"
    pl.read_csv(_EXAMPLES / "trace.csv").with_columns(
        pl.col("start_ts", "duration") * 1000
    ).write_csv(path)
    words = ["--job", str(_EXAMPLES / "trace_job.toml"), "--out", str(tmp_path / "profile")]
    (note,) = (
        line
        for line in answered(["fit", str(path), *words]).splitlines()
        if "read as seconds" in line
    )
    assert re.match(r"note: a step takes 15\d\d s on average", note)


def test_an_mfu_that_nobody_reaches_is_doubted():
    job = prism.load_job(_JOB)
    mean = prism.predict(job).mean
    slow, fast = throughput(job, mean), throughput(job, mean / 3)
    assert "note" not in slow.headline()
    assert "MFU above 80 %" in fast.headline().splitlines()[-1]


def test_a_link_of_its_own_is_plausible_where_it_is_alone():
    job: Any = prism.load_job(_JOB)
    one = (Link("nvlink", job.cluster.num_devices, 9e11),)
    cluster = msgspec.structs.replace(job.cluster, links=one)
    assert job_warnings(msgspec.structs.replace(job, cluster=cluster)) == job.notes
