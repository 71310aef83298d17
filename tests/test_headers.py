"""What the first line of a command's output says, and how it counts."""

import json
import re

import pytest

import prism_jax as prism
from prism_jax._summary import Column
from prism_jax.cli import main
from prism_jax.data import Job, Layout, Outline, ScheduleConfig, list_names, load_device, load_model
from prism_jax.profile import Profile
from prism_jax.profile._profile import Fitted

from .test_models_of_hugging_face import SMALL


_FSDP = """
kind = "job"
model = "llama-3.1-8b"
cluster = "dgx-h100"
world_size = 64
[training]
microbatch_size = 8
sequence_length = 8192
global_batch_size = 512
zero = 3
"""
_HEADER = (
    "Llama 3.1 8B, 64 x H100 SXM (8 nodes): FSDP over 64, 512 sequences of 8,192 tokens, "
    "1 microbatch of 8"
)


@pytest.fixture
def job(written):
    return str(written("c.toml", _FSDP))


@pytest.mark.parametrize(
    ("changes", "sharing"),
    [
        ([], "FSDP over 64"),
        (["training.zero=0"], "DDP over 64"),
        (["training.zero=1"], "dp 64 (ZeRO-1)"),
        (["training.zero=2", "layout.tp=2"], "tp 2, dp 32 (ZeRO-2)"),
        (["training.optimizer_instances=4"], "FSDP over 16 in 4 copies"),
        (["layout.cp=4", "layout.tp=2"], "tp 2, cp 4, FSDP over 32"),
        (["layout.pp=4"], "pp 4 (1f1b), FSDP over 16"),
        (["layout.pp=4", "schedule.virtual_stages=2"], "pp 4 x 2 (interleaved-1f1b), FSDP over 16"),
        (["layout.tp=8", "layout.pp=8"], "tp 8, pp 8 (1f1b)"),
    ],
)
def test_a_header_names_model_machine_layout_and_batch(changes, sharing, job):
    header = prism.load_job(job, ["training.microbatch_size=1", *changes]).header
    machine, _, how = header.partition(": ")
    assert machine == "Llama 3.1 8B, 64 x H100 SXM (8 nodes)"
    assert how.startswith(f"{sharing}, 512 sequences of 8,192 tokens, ")
    size = re.fullmatch(r".*, ([\d,]+) microbatch(?:es)? of 1", how)
    assert (
        int(size[1])
        == prism.load_job(job, changes)
        .replace(**{"training.microbatch_size": 1})
        .schedule.num_microbatches
    )


def test_headers_of_other_jobs():
    assert prism.load_job("llama-2-70b-lora-gh200-16").header.startswith(
        "Llama 2 70B (LoRA of rank 16), 16 x GH200 96GB (4 nodes): tp 4, dp 4 (ZeRO-1), 8 sequences"
    )
    # Samples that are no tokens have no length.
    assert prism.load_job("dit-xl-2-a100-8").header == (
        "DiT-XL/2, 8 x A100 80GB SXM (1 node): DDP over 8, 256 samples, 1 microbatch of 32"
    )
    alone = prism.load_job("dit-xl-2-a100-8", ["world_size=1"]).header
    assert alone == "DiT-XL/2, 1 x A100 80GB SXM (1 node): 32 samples, 1 microbatch of 32"
    traced = Job(Layout(pp=4, dp=2), ScheduleConfig("1f1b", 1), name="traced")
    assert traced.header == "traced, 8 GPUs: pp 4 (1f1b), dp 2, 1 microbatch"


def test_what_is_shipped_has_a_title_and_what_is_not_its_name(job, written):
    shipped = [*map(load_model, list_names("model")), *map(load_device, list_names("device"))]
    assert all(one.title for one in shipped)
    assert len({one.title for one in shipped}) == len(shipped)
    model = written(
        "small.toml",
        'kind = "model"\nnum_layers = 2\nhidden_size = 64\nnum_heads = 2\n'
        "ffn_size = 64\nvocab_size = 64\n",
    )
    assert prism.load_job(job, [f"model={model}"]).header.startswith("small, 64 x H100 SXM")
    titled = prism.load_job(job, [f"model={model}", "model.title=My model"])
    assert titled.header.startswith("My model, 64 x")


_SMALL = ["--samples", "64", "--set", "training.global_batch_size=64", "--set"]
_SMALL += ["training.microbatch_size=1"]


@pytest.mark.parametrize(
    "words",
    [
        ["predict", "JOB", "--allow-oom"],
        ["memory", "JOB"],
        ["simulate", "JOB", *_SMALL],
        ["run", "JOB", "--steps", "10", "--interval", "3600", "--runs", "100", *_SMALL],
        ["timeline", "JOB", "--out", "TMP.json", *_SMALL],
    ],
)
def test_each_command_begins_with_what_the_job_is(words, job, tmp_path, answered):
    where = {"JOB": job, "TMP.json": str(tmp_path / "step.json")}
    first = answered([where.get(word, word) for word in words]).splitlines()[0]
    if "--samples" not in words:
        assert first == _HEADER
    assert first.partition(": ")[0] == _HEADER.partition(": ")[0]
    assert " ops" not in first


_CONFIG = SMALL | {"model_type": "llama"}
_ARGUMENTS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 128 "
    "--max-position-embeddings 128 --micro-batch-size 1 --global-batch-size 8 "
    "--vocab-size 256 --tensor-model-parallel-size 2 --bf16"
)


@pytest.mark.parametrize(
    ("name", "text", "options", "assumed"),
    [
        ("tiny.json", json.dumps(_CONFIG), [], ["cluster=dgx-h100", "layout.tp=1", "layout.pp=1"]),
        (
            "tiny.json",
            json.dumps(_CONFIG),
            ["--cluster", "dgx-h200"],
            ["layout.tp=1", "layout.pp=1"],
        ),
        ("tiny.sh", _ARGUMENTS, ["--set", "cluster=dgx-a100"], ["layout.pp=1"]),
        ("tiny.sh", _ARGUMENTS, ["--cluster", "dgx-h100", "--set", "layout.pp=2"], []),
    ],
)
def test_an_import_is_named_and_says_what_it_assumed(
    name, text, options, assumed, tmp_path, answered
):
    (tmp_path / name).write_text(text)
    words = ["import", str(tmp_path / name), "--gpus", "8", "--batch", "8", *options]
    notes = [
        note
        for note in answered([*words, "--json", "--out", str(tmp_path / "job.toml")])["notes"]
        if note.startswith("Assumed")
    ]
    assert re.findall(r"`([\w.]+=\S+)`", " ".join(notes)) == assumed
    job = prism.load_job(tmp_path / "job.toml")
    assert job.model.name == "tiny"
    assert job.header.startswith("tiny, 8 x ")


_ONE = re.compile(
    r"(?<![\d.,])1 (?:pipeline )?"
    r"(GPU|node|rank|op|step|layer|row|run|microbatche|sequence|replica|file|layout|program)s\b"
)


@pytest.mark.parametrize(
    "words",
    [
        ["layouts", "megatron-22b-a100-8", "--gpus", "1", "--by", "mean"],
        ["predict", "megatron-22b-a100-8", "--set", "cluster.devices_per_node=1"],
        ["predict", "dit-xl-2-a100-8", "--set", "cluster.links.nvlink.group=1"],
    ],
)
def test_one_of_a_thing_is_not_several(words, capsys):
    main(words)
    said = capsys.readouterr()
    assert re.search(r"\b1 (GPU|node|pipeline rank|rank|device)\b", said.out + said.err)
    assert not _ONE.search(said.out + said.err)


@pytest.mark.parametrize(("low", "high"), [(0.001003, 0.0338), (0.95e-5, 3.0), (2.0, 2.2)])
def test_both_ends_of_an_interval_of_a_positive_figure_have_two_digits(low, high):
    text = Column("std", "of").text({"of": (low, high)})
    for end, shown in zip((low, high), text.split(" .. "), strict=True):
        digits = shown.partition("e")[0].replace(".", "").lstrip("0")
        assert len(digits) >= 2
        assert float(shown) == pytest.approx(end, rel=0.06)


def test_a_profile_is_named_with_its_ranks_and_ops():
    parts = (Layout(pp=2, dp=4), ScheduleConfig("1f1b", 2), Outline(), (), ())
    profile = Profile("traced", *parts, Fitted(num_steps=7))
    assert profile.header(1) == "traced: 8 ranks, 1 op"
    assert profile.header(1234) == "traced: 8 ranks, 1,234 ops"
