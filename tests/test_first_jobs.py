"""A first job, written by a command; and what a job says of its software stack."""

import re
from typing import Any

import msgspec
import pytest

import prism_jax as prism
from prism_jax import data, prediction


def load_job(*words) -> Any:
    return prism.load_job(*words)


@pytest.fixture
def init(answered):
    """A function that writes a first job to a path, and reads it."""

    def run(path, *words: str) -> Any:
        answered(["init", path, "--force", *words])
        return load_job(path)

    return run


def test_a_first_job_has_eight_keys_with_a_comment_on_each(tmp_path, init):
    path = tmp_path / "job.toml"
    job = init(path, "--gpus", "64", "--global-batch", "512")
    lines = path.read_text().splitlines()
    assert len(lines) <= 40
    keys = [line for line in lines if not line.startswith("#")]
    assert len(keys) == 8
    assert all("  # " in line for line in keys[1:])
    assert (job.layout.world_size, job.batch_size, job.cluster.num_devices) == (64, 512, 64)
    # All stacks are listed, and one is active.
    comments = " ".join(line for line in lines if line.startswith("#"))
    assert all(name in comments for name in data.list_names("software stack"))
    assert job.training.software == "torchtitan"


@pytest.mark.parametrize(
    ("words", "stack"),
    [
        (["--set", "layout.tp=8", "--set", "layout.pp=2"], "megatron-core-2024"),
        (["--set", "training.zero=0"], "megatron-core-2024"),
        (["--set", "layout.tp=8", "--set", "training.zero=3"], "torchtitan"),
        (["--cluster", "dgx-a100"], "llm-foundry"),
        (["--cluster", "tpu-v6e"], "maxtext-tpu"),
        (["--model", "mixtral-8x7b", "--set", "layout.ep=8"], "automodel"),
        (["--model", "mixtral-8x7b", "--set", "layout.pp=4"], "megatron-bridge-2025"),
        (["--set", "training.software=nemo-2024"], "nemo-2024"),
    ],
)
def test_the_stack_of_a_first_job_is_of_its_layout_and_cluster(tmp_path, words, stack, init):
    job = init(tmp_path / "job.toml", "--gpus", "32", *words)
    assert job.training.software == stack
    assert (job.layout.world_size, job.batch_size) == (32, 256)
    # What is set, and nothing else, is in the file.
    changes = [word for word in words if "=" in word]
    others = {f"training.{key}" for key in ("microbatch_size", "sequence_length", "software")}
    others |= {"training.global_batch_size", "world_size", "cluster.num_nodes"}
    sizes = {key for key in job.given.keys if not key.startswith(("model", "cluster"))}
    assert sizes <= others | {change.partition("=")[0] for change in changes}


def test_a_first_job_takes_each_key_that_a_file_has(tmp_path, refused, init):
    path = tmp_path / "job.toml"
    job = init(path, "--set", "training.adapters.rank=16", "--set", "layout.tp=2")
    assert (job.training.adapters.rank, job.layout.dp) == (16, 32)
    short = init(path, "--model", "gpt3-175b", "--set", "layout.tp=8")
    assert short.training.sequence_length == 2048  # As many as it has positions.
    assert init(path, "--set", "source=2026-11-28").source == "2026-11-28"
    for words, said in (
        (["--gpus", "48", "--global-batch", "512"], "is 512, not a multiple of .*; use 480 or 528"),
        (["--set", "model.num_layers=3"], "give the name or the file of a model as `--model`"),
        (["--set", "cluster=dgx-a100"], "give the name or the file of a cluster as `--cluster`"),
        (["--set", "world_size=8"], "give `--gpus`"),
        (["--set", "training.global_batch_size=8"], "give `--global-batch`"),
        (["--set", "kernels.rank.sigma=0"], "give it to the commands that read the job"),
        (["--set", "training=3"], "expected a table"),
        (["--set", "layout.tp=16"], "does not divide `model.num_kv_heads`"),
        (["--model", "dit-xl-2"], "without words; .* `--set training.sequence_length=256`"),
        (["--set", "layout.up=3"], "No key `layout.up`"),
        (["--set", "layout=3"], "expected a table, got .* such as `layout.tp`"),
    ):
        told = refused(["init", str(tmp_path / "other.toml"), *words])
        assert re.search(said, told)
    assert not (tmp_path / "other.toml").exists()


def test_each_class_of_jobs_has_one_nearest_stack():
    stacks = [data.load_software(name) for name in data.list_names("software stack")]
    listed = [(kind, stack) for stack in stacks for kind in stack.nearest_to]
    generations = {data.generation_of(device) for device in data.list_names("device")}
    assert sorted(kind for kind, _ in listed) == sorted(
        f"{model} {sharding} {generation}"
        for model in ("dense", "experts", "tables")
        for sharding in ("FSDP", "no FSDP")
        for generation in generations
    )
    for kind, stack in listed:
        assert ("no FSDP" in kind) == (stack.training["zero"] != 3) or "TPU" in kind
    for name in data.list_names("job"):
        job = load_job(name)
        assert (
            " ".join(prediction.class_of(job)[:3])
            in data.load_software(prediction.nearest_stack(job)).nearest_to
        )


_PLAIN = {f"training.{f.name}": f.default for f in msgspec.structs.fields(data.Training)}
_PLAIN |= {"training.gradient_dtype": "bf16"}  # As the model.


@pytest.mark.parametrize(
    ("cluster", "stack"), [("gcp-a3-high", "torchtitan"), ("aws-p4d", "llm-foundry")]
)
def test_what_a_stack_does_is_the_difference_of_two_predictions(
    tmp_path, answered, cluster, stack, init
):
    """Of each key that moves the step by more than 5 %, and of no other."""
    path = tmp_path / "job.toml"
    words = ["--cluster", cluster, "--set", f"training.software={stack}"]
    job = init(path, *words, "--set", "training.sequence_length=2048")
    mean = prism.predict(job).mean
    effects = prediction.effects_of_stack(job, mean)
    told = set()
    for effect in effects:
        plain = load_job(path, {key: _PLAIN[key] for key in effect.keys})
        assert effect.longer == pytest.approx(mean / prism.predict(plain).mean - 1, rel=1e-12)
        assert abs(effect.longer) > 0.05
        told |= {*effect.keys}
    assert "training.gradient_dtype" in told
    for key in {f"training.{key}" for key in data.load_software(stack).training} - told:
        plain = load_job(path, {key: _PLAIN[key]})
        change = mean / prism.predict(plain).mean - 1
        assert abs(change) <= 0.05 or not prediction.fits(plain), key
    lines = answered(["predict", str(path)]).splitlines()
    told_lines = [line for line in lines if line.startswith(f"{stack} makes ")]
    assert told_lines == [effect.text for effect in effects]
    # What the job itself gives is no matter of the stack.
    given = load_job(path, ["training.gradient_dtype=fp32"])
    assert "gradient_dtype" not in str(prediction.effects_of_stack(given, mean))


def test_a_job_without_a_stack_says_what_is_not_counted(tmp_path, answered, init):
    path = tmp_path / "job.toml"
    job = init(path).replace(**{"training.software": None, "training.zero": 3})
    mean = prediction.mean_step(job)
    assert mean == prism.predict(job).mean
    assert "does not change the step" in prediction.uncounted(load_job("gpt3-175b-h100-4096"))
    told = prediction.uncounted(job, mean)
    assert told == prediction.uncounted(job)
    assert "launches by the host, unfused kernels, FSDP's copies are not counted" in told
    nearest = prediction.nearest_stack(job)
    longer = prediction.mean_step(job.replace(**{"training.software": nearest})) / mean - 1
    assert f"`training.software={nearest}`, makes the step {100 * longer:.0f} % longer" in told
    assert prediction.uncounted(load_job(path)) == ""
    floor = job.replace(**{"training.launch_floor_s": 4e-6})
    assert "launches by the host" not in prediction.uncounted(floor)
    plain = ["training.zero=3", "training.software=plain.toml"]
    (tmp_path / "plain.toml").write_text('kind = "software"\nsource = "x"\n[training]\n')
    assert not prediction.effects_of_stack(load_job(path, plain), mean)
    data.save_job(job, path)
    for command in ("predict", "show"):
        assert told in answered([command, str(path)]).splitlines()
    found = answered(["predict", str(path), "--json"])
    assert (found["uncounted"], found["effects_of_stack"]) == (told, [])


def test_what_follows_is_no_part_of_a_layout_that_fits(
    tmp_path, answered, refused, monkeypatch, init
):
    path = tmp_path / "job.toml"
    job = init(path, "--gpus", "8", "--set", "training.zero=0")
    best = job.replace(**{"layout.tp": 8, "training.zero": 1})
    assert best.schedule.num_microbatches == 8 * job.schedule.num_microbatches
    monkeypatch.setattr("prism_jax.layouts._advice.best_on_same_gpus", lambda job: best)
    (sets,) = re.findall(r"use `(.*?)`", refused(["predict", str(path)]))
    assert sets.split() == ["--set", "layout.tp=8", "--set", "training.zero=1"]
    answered(["predict", path, *sets.split()])
    # Without a number of GPUs and a batch, nothing follows.
    alone = {"world_size": None, "training.global_batch_size": None, "layout.dp": 8}
    data.save_job(job.replace(**alone, **{"schedule.num_microbatches": 8}), path)
    assert "layout.dp=1 --set schedule.num_microbatches=64" in refused(["predict", str(path)])
