"""What a job leaves out follows from the rest: replicas, nodes and microbatches."""

import itertools as it
import json
import tomllib
from typing import Any

import msgspec
import pytest

import prism_jax as prism
from prism_jax.__main__ import main
from prism_jax.data import assumed_keys, save_job


_JOB = """\
kind = "job"
model = "llama-3.1-8b"
cluster = "dgx-h100"
world_size = 64
training.global_batch_size = 512
training.microbatch_size = 1
training.sequence_length = 8192
training.software = "torchtitan"
"""
_DERIVED = {"layout.dp", "cluster.num_nodes", "schedule.num_microbatches", "schedule.kind"}


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(_JOB)
    return path


def load_job(*words) -> Any:
    return prism.load_job(*words)


def _origins(job):
    return {key.key: key.where_from for key in assumed_keys(job)}


def test_replicas_nodes_and_microbatches_follow(path):
    for tp, pp, size, gpus in it.product((1, 2), (1, 4), (2,), (96, 64)):
        changes = [f"layout.tp={tp}", f"layout.pp={pp}", f"training.microbatch_size={size}"]
        batch = 8 * gpus
        total = [f"world_size={gpus}", f"training.global_batch_size={batch}"]
        job = load_job(path, [*changes, *total])
        assert job.layout.world_size == gpus == job.cluster.num_devices
        assert job.batch_size == batch
        assert job.schedule.kind == "1f1b"
        written = [f"layout.dp={gpus // tp // pp}", f"num_nodes={gpus // 8}"]
        written += [f"schedule.num_microbatches={8 * tp * pp // size}"]
        assert load_job(path, [*changes, *total, *written]) == job
    assert load_job(path, ["world_size=4"]).cluster.num_nodes == 1
    interleaved = ["layout.pp=2", "schedule.virtual_stages=2"]
    assert load_job(path, interleaved).schedule.kind == "interleaved-1f1b"


def test_totals_of_the_command_line_replace_what_a_file_says():
    job = load_job("gpt3-175b-h100-4096")
    half = load_job("gpt3-175b-h100-4096", ["world_size=2048"])
    assert (half.layout.dp, half.cluster.num_nodes) == (job.layout.dp // 2, 256)
    assert half.schedule == job.schedule
    batch = [f"training.global_batch_size={2 * job.batch_size}"]
    twice = load_job("gpt3-175b-h100-4096", batch).schedule
    assert twice.num_microbatches == 2 * job.schedule.num_microbatches


def test_files_hold_only_what_was_given(path, tmp_path):
    job, again = load_job(path, ["layout.tp=2"]), tmp_path / "again.toml"
    assert {key for key, origin in _origins(job).items() if origin == "derived"} == _DERIVED
    save_job(job, again)
    table = tomllib.loads(again.read_text())
    assert (table["layout"], table["world_size"]) == ({"tp": 2}, 64)
    assert not {"num_nodes", "schedule"} & {*table}
    assert load_job(again) == job
    assert load_job(again, ["world_size=128"]).layout.dp == 64
    # Without the number of GPUs no layout follows, as of the file.
    for change in (load_job(path).replace, lambda **values: load_job(path, values)):
        with pytest.raises(ValueError, match="or `world_size`, from which it follows"):
            change(world_size=None)
    # What is given stays given, also where it would follow.
    save_job(load_job(path, ["layout.dp=64", "num_nodes=8"]), again)
    table = tomllib.loads(again.read_text())
    assert (table["layout"], table["num_nodes"]) == ({"dp": 64}, 8)
    # What is changed in Python is written.
    fewer = msgspec.structs.replace(job.schedule, num_microbatches=4)
    training = msgspec.structs.replace(job.training, global_batch_size=None)
    changed = msgspec.structs.replace(job, schedule=fewer, training=training)
    save_job(changed, again)
    assert load_job(again) == changed


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["layout.tp=3"], r"`world_size` is 64, which tp\*pp\*cp = 3\*1\*1 = 3 does not"),
        (["layout.dp=32"], "`world_size` is 64, but `layout` has .* = 32 ranks; .* it follows"),
        (["training.global_batch_size=500"], "500, not a multiple of .* = 64; use 448 or 512"),
        (["training.global_batch_size=5"], "use 64, or"),
        (
            ["schedule.num_microbatches=3"],
            r"is 512, but dp.* = 64\*3\*1 = 192; .* follows",
        ),
        (["num_nodes=4"], "only 32 devices"),
        (["world_size='x'"], "`world_size` is 'x'"),
        (["layout.tp=x"], "`layout.tp` is 'x': expected `int`"),
        (["layout.dp=0"], "`layout.dp` is 0: expected `int` >= 1"),
        ({"world_size": None}, "`layout` is missing; add it, or `world_size`, from which"),
        ({"training.global_batch_size": None}, "`schedule` is missing; .*, or `training.global_b"),
        (["training.offload=[x]"], r"expected a list such as \[1, 2\], got `str`"),
        (["cluster.devices_per_node=0"], "`cluster.devices_per_node` is 0: expected `int` >= 1"),
        (['training.offload=["x"]'], "^override .*: the key `training.offload.0.` is 'x'"),
    ],
)
def test_a_contradiction_is_one_sentence(path, changes, said):
    with pytest.raises(ValueError, match=said) as raised:
        load_job(path, changes)
    assert "\n" not in str(raised.value)
    assert str(raised.value).count(". ") == 0


def test_every_command_that_takes_a_job_takes_a_number_of_gpus(path, capsys):
    assert main(["predict", str(path), "--gpus", "128", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["world_size"] == 128
    assert main(["show", str(path), "--gpus", "128", "--set", "layout.tp=2", "--json"]) == 0
    keys = {key["key"]: key for key in json.loads(capsys.readouterr().out)["keys"]}
    assert (keys["layout.dp"]["value"], keys["layout.dp"]["origin"]) == (64, "derived")
    assert main(["predict", str(path), "--gpus", "100"]) == 2
    assert "not a multiple" in capsys.readouterr().err
    # The batch is what the job is, and has an effect.
    assert main(["predict", str(path)]) == 0
    assert "global_batch_size" not in capsys.readouterr().err


def test_names_of_pytorch_are_taken_for_each_dtype(path):
    for key in ("dtype", "gradient_dtype", "gather_dtype", "gradient_comm_dtype"):
        job = load_job(path, {f"training.{key}": "torch.bfloat16"})
        assert getattr(job.training, key) == "bf16"


def test_a_number_of_gpus_is_given_once_and_shown_once(path, capsys, monkeypatch):
    from prism_jax.cli import _compare

    sweep = ["sweep", str(path), "--over", "world_size=32,64", "--samples", "8"]
    assert main([*sweep, "--gpus", "8"]) == 2
    told = capsys.readouterr().err
    assert "`world_size` is given twice, world_size=8, world_size=32,64; keep one." in told

    rows = [{f"{name}_s": 1.0 for name in _compare._FIGURES} for _ in range(2)]
    for i, row in enumerate(rows):
        row |= {"row": i, "world_size": (32, 64)[i], "tokens_per_s_per_gpu": 1.0}
        ends = {f"{name}_{end}_s": 1.0 for name in _compare._FIGURES for end in ("low", "high")}
        row |= ends
    monkeypatch.setattr(_compare, "_simulated", lambda *_: rows)
    assert main(sweep) == 0
    assert capsys.readouterr().out.splitlines()[0].split().count("world_size") == 1


def test_a_sweep_goes_on_without_the_points_that_cannot_be(path, capsys, monkeypatch):
    from prism_jax.cli import _compare

    seen = []
    monkeypatch.setattr(
        _compare, "_simulated", lambda given, grid, jobs: seen.append((grid, jobs)) or 1 / 0
    )
    words = ["sweep", str(path), "--over", "layout.tp=1,3,5,8", "--samples", "8"]
    with pytest.raises(ZeroDivisionError):
        main([*words, "--over", "training.microbatch_size=1,64"])
    grid, jobs = seen[0]
    assert [point["layout.tp"] for point in grid] == ["1", "8"]
    assert [job.layout.dp for job in jobs] == [64, 8]
    notes = capsys.readouterr().err.splitlines()
    assert sum("is left out:" in note for note in notes) == 6
    assert any("layout.tp=3" in note and "does not divide" in note for note in notes)
    assert main([*words[:3], "layout.tp=3,5", "--samples", "8"]) == 2
    assert "all 2 points are refused" in capsys.readouterr().err


def test_a_comparison_goes_on_without_the_points_that_cannot_be(path, capsys, monkeypatch):
    from prism_jax.cli import _compare

    seen = []
    monkeypatch.setattr(
        "prism_jax.layouts.rank_layouts", lambda jobs, *more, **how: seen.append(jobs)
    )
    monkeypatch.setattr(_compare, "ranked", lambda *what: ({}, ""))
    words = ["compare", str(path), "--samples", "32", "--json", "--over"]
    assert main([*words, "layout.tp=1,3,8"]) == 0
    said = capsys.readouterr()
    assert [job.layout.dp for job in seen[0]] == [64, 8]
    (left_out,) = json.loads(said.out)["left_out"]
    assert (left_out["job"], left_out["values"]) == (str(path), {"layout.tp": "3"})
    assert "does not divide" in left_out["why"]
    assert "layout.tp=3 is left out:" in said.err
    assert main([*words, "layout.tp=3,5"]) == 2
    assert "all 2 points are refused" in capsys.readouterr().err
