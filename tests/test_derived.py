"""What is given and what follows: from the rest of a job, from a stack, in files and in `show`."""

import functools as ft
import itertools as it
import json
import pathlib
import re
import tomllib
from typing import Any

import msgspec
import numpy as np
import pytest

import prism_jax as prism
from prism_jax.calibration import with_calibrated
from prism_jax.cli import _compare, main
from prism_jax.cli._load import tell_idle_sets
from prism_jax.cli._main import make_parser
from prism_jax.data import Calibrated, Variation, assumed_keys, list_names, make_job, save_job
from prism_jax.importers import import_job

from .helpers import refusal
from .test_importers import CONFIGS


load_job: Any = prism.load_job  # Its jobs have a `training`, which the type of jobs may lack.
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
def path(written):
    return written("job.toml", _JOB)


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
        (["schedule.num_microbatches=3"], r"is 512, but dp.* = 64\*3\*1 = 192; .* follows"),
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


def test_every_command_that_takes_a_job_takes_a_number_of_gpus(path, answered, refused, capsys):
    assert answered(["predict", str(path), "--gpus", "128", "--json"])["world_size"] == 128
    keys = {
        key["key"]: key
        for key in answered(["show", str(path), "--gpus", "128", "--set", "layout.tp=2", "--json"])[
            "keys"
        ]
    }
    assert (keys["layout.dp"]["value"], keys["layout.dp"]["origin"]) == (64, "derived")
    assert "not a multiple" in refused(["predict", str(path), "--gpus", "100"])
    # The batch is what the job is, and has an effect.
    assert main(["predict", str(path)]) == 0
    assert "global_batch_size" not in capsys.readouterr().err


def test_names_of_pytorch_are_taken_for_each_dtype(path):
    for key in ("dtype", "gradient_dtype", "gather_dtype", "gradient_comm_dtype"):
        job = load_job(path, {f"training.{key}": "torch.bfloat16"})
        assert getattr(job.training, key) == "bf16"


def test_a_number_of_gpus_is_given_once_and_shown_once(path, refused, answered, monkeypatch):
    sweep = ["sweep", str(path), "--over", "world_size=32,64", "--samples", "8"]
    told = refused([*sweep, "--gpus", "8"])
    assert "`world_size` is given twice, world_size=8, world_size=32,64; keep one." in told

    rows = [{f"{name}_s": 1.0 for name in _compare._FIGURES} for _ in range(2)]
    for i, row in enumerate(rows):
        row |= {"row": i, "world_size": (32, 64)[i], "tokens_per_s_per_gpu": 1.0}
        ends = {f"{name}_{end}_s": 1.0 for name in _compare._FIGURES for end in ("low", "high")}
        row |= ends
    monkeypatch.setattr(_compare, "_simulated", lambda *_: rows)
    assert answered(sweep).splitlines()[0].split().count("world_size") == 1


def test_a_sweep_goes_on_without_the_points_that_cannot_be(path, refused, capsys, monkeypatch):
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
    assert "all 2 points are refused" in refused([*words[:3], "layout.tp=3,5", "--samples", "8"])


def test_a_comparison_goes_on_without_the_points_that_cannot_be(path, refused, capsys, monkeypatch):
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
    assert "all 2 points are refused" in refused([*words, "layout.tp=3,5"])


_JOBS = pathlib.Path(__file__).parents[1] / "jobs"
_STACKS = list_names("software stack")
_FLAGS = """--num-layers 4 --hidden-size 64 --num-attention-heads 4 --vocab-size 512
    --seq-length 128 --max-position-embeddings 128 --micro-batch-size 1 --bf16
    --sequence-parallel"""


def _keys(table, prefix=""):
    if isinstance(table, dict):
        return {k for name, one in table.items() for k in _keys(one, f"{prefix}.{name}")}
    if isinstance(table, list) and table and isinstance(table[0], dict):
        return {k for i, one in enumerate(table) for k in _keys(one, f"{prefix}[{i}]")}
    return {prefix}


def _written(job, path):
    save_job(job, path)
    return tomllib.loads(path.read_text())


def _notes(words, capsys):
    assert main(words) == 0
    lines = capsys.readouterr().err.splitlines()
    return [line for line in lines if "`--set " in line]


@pytest.fixture
def qwen(written):
    """A configuration of Hugging Face, with what is given on the command line to import it."""
    config = CONFIGS["qwen3-235b-a22b"] | {"num_hidden_layers": 4}
    path = written("config.json", json.dumps(config))
    return [str(path), "--gpus", "16", "--batch", "64", "--set", "layout.ep=8", "--allow-oom"]


@pytest.mark.parametrize("name", list_names("job"))
def test_a_saved_job_has_the_keys_of_its_file(name, tmp_path):
    job = load_job(name)
    table = _written(job, tmp_path / "saved.toml")
    named = _keys(table) - {".name"}  # The name of the other file.
    assert named == _keys(tomllib.loads((_JOBS / f"{name}.toml").read_text())) - {".name"}
    assert load_job(tmp_path / "saved.toml") == job


def test_an_imported_job_takes_the_same_step_with_every_stack_as_one_by_hand(qwen, tmp_path):
    out = tmp_path / "imported.toml"
    assert main(["import", *qwen, "--out", str(out)]) == 0
    by_hand = {
        "cluster": "dgx-h100",
        "num_nodes": 2,
        "model": tomllib.loads(out.read_text())["model"],
        "layout": {"dp": 16, "ep": 8},
        "schedule": {"kind": "1f1b", "num_microbatches": 4},
        "training": {"microbatch_size": 1, "sequence_length": 8192},
    }
    steps = set()
    for stack in _STACKS:
        training = by_hand["training"] | {"software": stack}
        job = make_job(by_hand | {"training": training}, tmp_path / "by_hand.toml")
        steps.add(prism.predict(job).mean)
        imported = load_job(out, [f"training.software={stack}"])
        assert prism.predict(imported).mean == prism.predict(job).mean, stack
    assert len(steps) > 6
    assert main(["import", *qwen, "--out", str(out), "--force", "--software", stack]) == 0
    assert load_job(out) == imported


def test_calibrated_and_ranked_jobs_still_follow_the_stack(tmp_path):
    job, path = load_job("examples/job.toml"), tmp_path / "calibrated.toml"
    calibrated = Calibrated("me", 1.1, (Variation("", "rank", "power", {}, "me"),))
    save_job(with_calibrated(job, calibrated), path)
    change = ["training.software=torchtitan"]
    other: Any = with_calibrated(load_job("examples/job.toml", change), calibrated)
    assert other.training.zero == 3
    assert load_job(path, change) == other
    parts = {"training": job.training, "kernels": job.kernels, "batch_size": job.batch_size}
    space = prism.layouts.LayoutSpace(tp=(2,), pp=(4,), cp=(1,), zero=(1,))
    listed = prism.layouts.enumerate_layouts(job.model, job.cluster, 32, space=space, **parts)
    table = _written(listed[0], path)
    assert load_job(path) == listed[0]
    assert "zero" not in table["training"]
    assert load_job(path, change).training.prefetch == other.training.prefetch


def test_a_value_that_is_changed_in_python_is_written(tmp_path):
    job, path = load_job("examples/job.toml"), tmp_path / "job.toml"
    replace = msgspec.structs.replace
    before = _written(job, path)["training"]
    training = replace(job.training, zero=3, overlap_grad_reduce=False)
    changed = replace(job, training=training)
    assert _written(changed, path)["training"] == before | {"zero": 3, "overlap_grad_reduce": False}
    assert load_job(path) == changed
    # Another stack in Python keeps all values, and so does the file; an override takes its own.
    renamed = replace(job, training=replace(job.training, software="torchtitan"))
    assert _written(renamed, path)["training"]["zero"] == 1
    assert load_job(path) == renamed
    made = prism.Job(prism.Layout(), prism.data.ScheduleConfig("1f1b", 2), name="made")
    assert _written(made, path) == {
        "kind": "job",
        "layout": {},
        "schedule": {"num_microbatches": 2},  # Of which 1F1B is the usual kind.
        "name": "made",
    }
    assert load_job(path) == made
    with pytest.raises(ValueError, match=r"kernels of the job `job` were changed, as `--set ker"):
        save_job(load_job("examples/job.toml", ["kernels.rank.sigma=0.5"]), path)
    save_job(load_job("examples/job.toml", ["kernels.rank.sigma=0.005"]), path)
    none = load_job("examples/job.toml", ["training.software=internevo"])
    none = replace(none, training=replace(none.training, gradient_bucket_size=None))
    refusal(lambda: save_job(none, path), "`training.gradient_bucket_size` is `None`, but")


@pytest.mark.parametrize("name", ["gpt3-175b-h100-4096", "llama-2-70b-lora-gh200-16"])
def test_a_job_replaces_keys_as_its_file_with_overrides(name):
    job = load_job(name)
    assert job.replace() == job
    values = {"training.zero": np.int64(1), "layout.tp": 2, "kernels.rank.sigma": 0.01}
    texts = [f"{key}={value}" for key, value in values.items()]
    assert job.replace(**values) == load_job(name, values) == load_job(name, texts)
    # Changed kernels stay, unless they are of another machine.
    changed = load_job(name, texts[2:])
    assert changed.replace(**{"layout.tp": 2}).kernels == changed.kernels
    wider = {"kernels.rank.sigma": 0.5}
    assert changed.replace(**wider) == load_job(name, wider)
    with pytest.raises(ValueError, match="and those of its new cluster"):
        changed.replace(**{"cluster": "dgx-h200", "training.dtype": "bf16"})
    refusal(lambda: job.replace(**{"layout.tpp": 2}), "did you mean `layout.tp`")
    with pytest.raises(ValueError, match=r"`training\.zero` was given a `object`"):
        job.replace(**{"training.zero": object()})


def test_what_follows_from_keys_follows_from_replaced_ones():
    table = {
        "world_size": 64,
        "model": "megatron-22b",
        "cluster": "dgx-a100",
        "layout": {"tp": 8},
        "training": {"microbatch_size": 1, "sequence_length": 2048, "global_batch_size": 32},
    }
    job: Any = make_job(table, pathlib.Path("mine.toml"))
    other = job.replace(**{"layout.tp": 4, "cluster": "dgx-h100"})
    assert (job.layout.dp, job.schedule.num_microbatches) == (8, 4)
    assert (other.layout.dp, other.schedule.num_microbatches) == (16, 2)
    assert job.replace(world_size=8).cluster.num_nodes == 1
    fixed = job.replace(**{"layout.dp": 8})
    assert fixed.replace(**{"layout.dp": None, "layout.tp": 4}).layout.dp == 16


def test_a_stack_beside_a_job_is_found_from_another_folder(tmp_path):
    (tmp_path / "here").mkdir()
    stack = 'kind = "software"\nsource = "me"\n[training]\nprefetch = 7\nrecompute = "full"\n'
    (tmp_path / "here/mine.toml").write_text(stack)
    text = pathlib.Path("examples/one_device.toml").read_text()
    text = text.replace("[training]", '[training]\nsoftware = "mine.toml"')
    (tmp_path / "here/job.toml").write_text(text)
    job = load_job(tmp_path / "here/job.toml")
    (tmp_path / "there").mkdir()
    table = _written(job, tmp_path / "there/job.toml")
    assert load_job(tmp_path / "there/job.toml") == job
    assert "prefetch" not in table["training"]
    origins = {key.key: key.where_from for key in prism.data.assumed_keys(job)}
    assert origins["training.prefetch"].startswith("stack ")


def test_show_says_where_each_value_is_from(answered):
    words = ["show", "examples/job.toml", "--set", "training.gradient_dtype=fp32"]
    keys = {key["key"]: key for key in answered([*words, "--json"])["keys"]}
    found = {key: (one["origin"], one["stack"]) for key, one in keys.items()}
    assert found["training.gradient_dtype"] == ("given", "")  # As the stack would have it.
    assert found["training.host_module_s"] == ("stack", "megatron-core-2024")
    assert found["training.eager_share"] == ("default", "")
    assert found["cluster.links[1].group"] == ("default", "")
    text = answered(words)
    for key, origin in (("eager_share", "default"), ("zero", "stack megatron-core-2024")):
        assert re.search(rf"^training\.{key} .* {origin}$", text, re.MULTILINE)


def test_a_set_that_changes_nothing_says_so(tmp_path, capsys):
    job = "examples/job.toml"
    idle = ["training.zero=1", "layout.tp=2", "num_nodes=4", "kernels.rank.sigma=0.005"]
    words = [word for change in idle for word in ("--set", change)]
    notes = _notes(["predict", job, *words], capsys)
    assert [note.split("`")[1].removeprefix("--set ") for note in notes] == idle
    active = ["training.zero=0", "layout.tp=1", "num_nodes=8", "kernels.rank.sigma=0.006"]
    words = [word for change in active for word in ("--set", change)]
    assert _notes(["memory", job, *words, "--allow-implausible"], capsys) == []
    # A value that the stack has changes nothing, except where the stack is changed, too.
    torch = ["show", job, "--set", "training.software=torchtitan"]
    assert _notes([*torch, "--set", "training.zero=1"], capsys) == []
    assert len(_notes([*torch, "--set", "training.zero=3"], capsys)) == 1
    # Of several jobs, one that changes is enough.
    loaders = [ft.partial(load_job, name) for name in (job, "gpt3-175b-h100-768")]
    tell_idle_sets(["layout.tp=2", "layout.ep=1"], loaders)
    assert re.findall("`--set (.*?)`", capsys.readouterr().err) == ["layout.ep=1"]
    # A job that gives all keys of a stack does not follow it.
    full = pathlib.Path(job).read_text().split("software =")[0].replace("cluster.toml", "dgx-h100")
    for key, value in prism.data.load_software("torchtitan").training.items():
        if f"{key} =" not in full:
            full += f"{key} = {prism.data.toml_value(value)}\n"
    (tmp_path / "full.toml").write_text(full)
    (note,) = _notes(["show", str(tmp_path / "full.toml"), *torch[2:]], capsys)
    assert "changes no other key" in note


def test_each_command_with_set_says_what_changes_nothing():
    """Of the jobs that it names; `import` has none, and is tested by itself. `init` writes all."""
    _, commands = make_parser()
    destinations = {name: {one.dest for one in sub._actions} for name, sub in commands.items()}
    able = {name for name, found in destinations.items() if "overrides" in found}
    assert len(able) > 15
    without = {name for name in able if not destinations[name] & {"job", "jobs"}}
    assert without == {"import", "init"}


def test_an_import_says_which_set_changes_nothing(qwen, tmp_path, capsys):
    words = ["import", *qwen, "--set", "training.zero=1", "--out", str(tmp_path / "job.toml")]
    (note,) = _notes(words, capsys)
    assert "`--set training.zero=1` changes nothing" in note


@pytest.mark.parametrize(
    ("flags", "stack"),
    [
        ("", "megatron-core-2024"),
        ("--DDP-impl local", "megatron-core-2024"),
        ("--use-checkpoint-lr-scheduler", "megatron-2021"),
        ("--activations-checkpoint-num-layers 1", "megatron-2021"),
    ],
)
def test_an_import_takes_the_stack_of_the_time_of_the_flags(
    flags, stack, tmp_path, answered, refused
):
    path, out = tmp_path / "train.sh", tmp_path / "job.toml"
    path.write_text(f"{_FLAGS} {flags}")
    words = ["import", str(path), "--gpus", "8", "--out", str(out), "--json"]
    said = answered(words)
    assert said["software"] == stack
    assert any(f"`{stack}`; `--software` gives another" in note for note in said["notes"])
    training = tomllib.loads(out.read_text())["training"]
    assert training["software"] == stack
    # What a flag switches on is off without it; what no flag says is of the stack.
    assert (training["sequence_parallel"], training["overlap_grad_reduce"]) == (True, False)
    assert {"attention", "cp_comm_type", "launch_floor_s", "recompute"}.isdisjoint(training)
    stacks = prism.data.load_software(stack).training
    assert load_job(out).training.attention == stacks["attention"]
    said = answered([*words, "--force", "--software", "torchtitan"])
    assert said["software"] == "torchtitan"
    assert not any("--software" in note for note in said["notes"])
    assert load_job(out).training.prefetch == 1
    twice = ["--software", "torchtitan", "--set", "training.software=maxtext"]
    assert "say the same; give one of them" in refused([*words, "--force", *twice])


def test_an_import_from_hugging_face_says_that_it_has_no_stack(qwen, tmp_path, capsys):
    assert main(["import", *qwen, "--out", str(tmp_path / "job.toml")]) == 0
    said = capsys.readouterr()
    assert "does not say which software trains the model" in said.err
    assert "software stack: none" in said.out
    found: Any = import_job(qwen[0], 16, batch=64, overrides=["training.software=maxtext"])
    assert found.job.training.zero == 3
    assert not any("software" in note for note in found.notes)
