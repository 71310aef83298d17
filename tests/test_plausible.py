"""What is allowed and probably wrong is said in one line; what is shipped is plausible."""

import re

import msgspec
import numpy as np
import polars as pl
import pytest

import prism_jax as prism
from prism_jax.cli import main
from prism_jax.cli._load import tell_unit
from prism_jax.data import Link, list_clusters, list_jobs, list_models, notes_of
from prism_jax.program import throughput


_JOB = "megatron-175b-a100-64"


@pytest.mark.parametrize("name", list_jobs())
def test_shipped_jobs_are_plausible(name):
    job = prism.load_job(name)
    assert notes_of(job) == job.notes


def test_shipped_clusters_and_models_are_plausible():
    job = prism.load_job(_JOB)
    for name in list_clusters():
        changed = prism.load_job(_JOB, [f"cluster={name}", "num_nodes=100", "training.dtype=bf16"])
        assert notes_of(changed) == changed.notes, name
    for name in list_models():
        assert notes_of(msgspec.structs.replace(job, model=prism.load_model(name))) == job.notes


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
def test_what_is_probably_wrong_is_said(change, match, capsys):
    job = prism.load_job(_JOB, [change])
    said = notes_of(job)
    assert sum(bool(re.search(match, note)) for note in said) == 1
    assert all(len(note) < 300 and "\n" not in note for note in said)
    assert main(["show", _JOB, "--set", change]) == 0
    assert said[0] in capsys.readouterr().out


@pytest.mark.parametrize(("factor", "number"), [(0.69, 1), (0.71, 0), (1.49, 0), (1.6, 1)])
def test_a_calibration_that_explains_too_much_is_doubted(factor, number):
    job = prism.load_job(_JOB)
    calibrated = prism.data.Calibrated(source="steps", compute=factor)
    said = notes_of(msgspec.structs.replace(job, calibrated=calibrated))
    assert len(said) - len(job.notes) == number


def test_steps_in_milliseconds_are_noticed(tmp_path, capsys):
    path = tmp_path / "steps.csv"
    steps = 1100 + np.random.default_rng(0).normal(size=40)
    pl.DataFrame({"step_time_s": steps}).write_csv(path)
    words = ["score", "megatron-22b-a100-8", "--samples", "200", "--against", str(path)]
    assert main(words) == 0
    assert "is in seconds, not in milliseconds" in capsys.readouterr().err
    tell_unit("steps.csv", 1.1, 2.0)
    assert capsys.readouterr().err == ""


def test_an_mfu_that_nobody_reaches_is_doubted():
    job = prism.load_job(_JOB)
    mean = prism.predict(job).mean
    slow, fast = throughput(job, mean), throughput(job, mean / 3)
    assert slow is not None
    assert fast is not None
    assert [line for line in slow.lines() if "note" in line] == []
    assert "MFU above 80 %" in fast.lines()[-1]


def test_a_link_of_its_own_is_plausible_where_it_is_alone():
    job = prism.load_job(_JOB)
    assert job.cluster is not None
    one = (Link("nvlink", job.cluster.num_devices, 9e11),)
    cluster = msgspec.structs.replace(job.cluster, links=one)
    assert notes_of(msgspec.structs.replace(job, cluster=cluster)) == job.notes
