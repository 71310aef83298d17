"""The memory of ranks: published figures, closed forms, and jobs that do not fit."""

import itertools as it
import math
import os
import pathlib
import re
import statistics
import tomllib
import warnings
from typing import Any

import msgspec
import numpy as np
import pytest

import prism_jax as prism
from prism_jax.cli import main
from prism_jax.data import list_names, load_device, load_job
from prism_jax.layouts import check_memory
from prism_jax.layouts._advice import _as_set, best_on_same_gpus, changes_to
from prism_jax.prediction import costly_keys, with_values
from prism_jax.prediction._memory import RankMemory, _peaks
from prism_jax.workload import StageMemory

from .helpers import refusal


_GIB = 2**30
_LAYERS = ("attention", "core_attention", "norm", "dropout", "mlp")
_DATA = pathlib.Path(__file__).parents[2] / "shared" / "data"


# Korthikanti et al. 2022 (arXiv:2205.05198), figure 1, as reproduced to all digits from its
# equations 2, 4 and 5, and the 18 bytes of each of 12 L h^2 parameters: model, pipeline ranks,
# virtual stages, sequences of a microbatch; GiB of parameters, of activations without sequence
# parallelism or recompute, and with sequence parallelism and selective recompute.
_KORTHIKANTI = [
    ("megatron-22b", 1, 1, 4, 45.5625, 59.25, 9.5625),
    ("gpt3-175b", 8, 3, 1, 45.5625, 66.84375, 12.3515625),
    ("megatron-530b", 35, 3, 1, 31.640625, 114.0234375, 23.076171875),
    ("megatron-1t", 64, 1, 1, 32.958984375, 131.25, 26.5625),
]


def _korthikanti(name, pp, virtual, size, *more):
    kind = "interleaved-1f1b" if virtual > 1 else "1f1b"
    overrides = (
        f"model={name}",
        "model.bias=false",
        "cluster=dgx-a100",
        "num_nodes=384",
        f"layout.pp={pp}",
        f"schedule.kind={kind}",
        f"schedule.num_microbatches={4 * pp}",
        f"schedule.virtual_stages={virtual}",
        f"training.microbatch_size={size}",
        "training.gradient_dtype=fp32",
    )
    return prism.memory(load_job("megatron-22b-a100-8", (*overrides, *more))).ranks[0].parts


@pytest.mark.parametrize(
    ("name", "pp", "virtual", "size", "held", "none", "selective"), _KORTHIKANTI
)
def test_korthikanti_to_every_digit(name, pp, virtual, size, held, none, selective):
    shape = (name, pp, virtual, size)

    def activations(*overrides):
        parts = _korthikanti(*shape, *overrides)
        return sum(parts.get(part, 0.0) for part in _LAYERS) / _GIB

    plain = ("training.sequence_parallel=false", "training.recompute=none")
    assert activations(*plain) == none
    assert activations("training.recompute=selective") == selective
    # The paper counts neither norms nor embeddings, so: what as many layers more make.
    model = prism.load_model(name)
    more = f"model.num_layers={2 * model.num_layers}"
    once, twice = (_korthikanti(*shape, *add) for add in ((), (more,)))
    names = ("parameters", "gradients", "optimizer")
    added = sum(twice[part] - once[part] for part in names)
    norms = 18 * 2 * 2 * model.hidden_size * model.num_layers / pp
    assert (added - norms) / _GIB == held


def _job(*overrides):
    """Its gradients are in float32, so that the optimizer needs no copy of them."""
    return load_job("megatron-175b-a100-64", ("training.gradient_dtype=fp32", *overrides))


def _in_flight(memory, rank):
    """How many layers' activations a rank holds, by its masks: two for each layer."""
    return memory.ranks[rank].parts["dropout"] / (2 * 2048 * 12288 / 8)


@pytest.mark.parametrize("microbatches", [8, 64])
def test_microbatches_in_flight_are_those_of_the_schedule(microbatches):
    count = f"schedule.num_microbatches={microbatches}"
    plain = (count, "schedule.virtual_stages=1")
    one = prism.memory(_job("schedule.kind=1f1b", *plain))
    every = prism.memory(_job("schedule.kind=gpipe", *plain))
    woven = prism.memory(_job(count))
    for rank in range(8):
        assert _in_flight(one, rank) == 12 * min(8 - rank, microbatches)
        assert _in_flight(every, rank) == 12 * microbatches
        chunks = min(2 * (7 - rank) + 2 * 8 + 1, 3 * microbatches)
        assert _in_flight(woven, rank) == 4 * chunks


@pytest.mark.parametrize(
    ("kind", "virtual", "microbatches", "whole"),
    [
        ("interleaved-1f1b", 3, 8, 1),  # All forwards come first, and no stage deals gradients yet.
        ("interleaved-1f1b", 3, 64, 2),
        ("looped-bfs", 3, 16, 1),
        ("1f1b", 1, 8, 1),
    ],
)
def test_unsharded_gradients_are_held_by_the_stages_that_reduce_them(
    kind, virtual, microbatches, whole
):
    shape = (f"schedule.kind={kind}", f"schedule.virtual_stages={virtual}")
    shape += (f"schedule.num_microbatches={microbatches}", "num_nodes=64", "layout.dp=8")
    shape += ("training.overlap_grad_reduce=true", "training.gradient_dtype=fp16")
    alone, shared = (
        prism.memory(_job(*shape, "training.accumulate_gradients=true", f"training.zero={zero}"))
        for zero in (1, 2)
    )
    of = [one.ranks[1].parts for one in (alone, shared)]
    share = 1 / 8 + whole / virtual
    assert of[1]["gradients"] == pytest.approx(share * of[0]["gradients"], rel=1e-12)
    assert {**of[0], "gradients": 0} == {**of[1], "gradients": 0}


def test_gradients_that_nobody_shares_are_not_whole_twice():
    alone = ("layout.dp=1", "training.zero=2", "training.overlap_grad_reduce=true")
    memory = prism.memory(_job(*alone, "training.accumulate_gradients=true"))
    assert memory == prism.memory(_job(*alone))


def test_recomputation_keeps_only_inputs():
    """Of each layer, or of every few of them, the input; of the others of a stage, all."""
    one = ("schedule.kind=1f1b", "schedule.virtual_stages=1", "training.recompute=full")
    states = 2 * 2048 * 12288 / 8  # Sequence parallelism splits them.
    whole = prism.memory(_job(*one)).ranks[1].parts
    assert whole["checkpoints"] == 7 * 12 * states
    assert "mlp" not in whole
    groups = prism.memory(_job(*one, "training.recompute_layers=4")).ranks[1].parts
    assert groups["checkpoints"] == 7 * 3 * states
    # Three layers more at once: 17 states of all kinds each, and the scores of unfused attention.
    layer = 17 * states + 5 * (96 // 8) * 2048**2
    assert groups["workspace"] - whole["workspace"] == pytest.approx(3 * layer, rel=1e-12)
    block = (*one, "training.recompute_method=block", "training.recompute_layers=5")
    some = prism.memory(_job(*block)).ranks[1].parts
    assert some["checkpoints"] == 7 * 5 * states
    assert some["dropout"] == 7 * 7 * 2 * states / 2


@pytest.mark.parametrize("module", ["core_attn", "layernorm", "mlp"])
def test_memory_saved_by_recomputing_a_module(module):
    job = _job("training.recompute=none")
    less = _job("training.recompute=selective", f"training.recompute_modules=['{module}']")
    before, after = prism.memory(job).ranks[0].parts, prism.memory(less).ranks[0].parts
    names = {"core_attn": "core_attention", "layernorm": "norm", "mlp": "mlp"}
    name = names[module]
    assert after.get(name, 0.0) == (before[name] / 2 if module == "layernorm" else 0)
    assert all(after[part] == before[part] for part in _LAYERS if part != name)


def test_replicas_share_the_optimizer():
    options = ("layout.dp=8", "cluster=dgx-a100", "num_nodes=64", "training.gradient_dtype=fp32")
    whole = prism.memory(_job(*options)).ranks[3].parts
    shared = prism.memory(_job(*options, "training.zero=1")).ranks[3].parts
    assert whole["optimizer"] == 8 * shared["optimizer"] == 6 * whole["parameters"]
    assert whole["gradients"] == shared["gradients"] == 2 * whole["parameters"]
    # In float32 while the optimizer runs, when there are no activations, and only then.
    half = prism.memory(_job(*options[:3], "training.gradient_dtype=bf16")).ranks[3].parts
    assert half["gradients"] == (1 + 2) * half["parameters"]
    assert half["optimizer"] == 6 * half["parameters"]
    assert "attention" not in half
    full = prism.memory(_job(*options[:3], "training.gradient_dtype=bf16", "training.zero=1"))
    assert full.ranks[3].parts["gradients"] == half["parameters"]
    assert "attention" in full.ranks[3].parts


def test_copies_of_the_optimizer_are_as_many_as_instances():
    options = ("layout.dp=8", "cluster=dgx-a100", "num_nodes=64", "training.zero=1")
    one, two = (
        prism.memory(_job(*options, f"training.optimizer_instances={n}"))
        .ranks[3]
        .parts["optimizer"]
        for n in (1, 2)
    )
    assert two == 2 * one


def test_experts_are_dealt_and_shared_by_their_own_degrees():
    options = ("model=mixtral-8x7b", "layout.tp=2", "layout.dp=8", "layout.pp=4")
    options += ("schedule.virtual_stages=1", "schedule.kind=1f1b", "training.zero=1")
    options += ("training.gradient_dtype=fp32",)
    experts = 8 * 8 * 3 * 4096 * 14336
    dense = 8 * (2 * 4096 * 40 * 128) / 2 + 8 * (8 * 4096 + 2 * 4096)
    for ep, etp in ((1, 2), (4, 2), (8, 1), (2, 1)):
        job = _job(*options, f"layout.ep={ep}", f"layout.etp={etp}")
        parts = prism.memory(job).ranks[1].parts
        assert parts["parameters"] == 2 * (dense + experts / (ep * etp))
        sharded = dense / 8 + experts / (ep * etp) / (16 // (ep * etp))
        assert parts["optimizer"] == pytest.approx(12 * sharded, rel=1e-12)


_EXPERTS = ("model=mixtral-8x7b", "layout.tp=1", "layout.pp=1", "layout.dp=64")
_EXPERTS += ("schedule.kind=1f1b", "schedule.virtual_stages=1", "training.recompute=none")


@pytest.mark.parametrize("activation", ["swiglu", "gelu", "squared_relu"])
def test_experts_keep_both_results_of_an_activation_without_a_gate(activation):
    """Three widths: before and after a gate, which a kernel applies with the weights of tokens; or
    before and after an activation, and after the weights (Megatron-Core, TEGroupedMLP).
    """
    parts = prism.memory(_job(*_EXPERTS, f"model.activation={activation}")).ranks[0].parts
    assert parts["experts"] == 32 * 2 * (2 * 2048) * (4096 + 3 * 14336)


def test_workspaces_of_libraries_grow_with_hopper_and_with_grouped_products():
    options = it.product(("dgx-a100", "dgx-h100"), ((), _EXPERTS))
    jobs = [_job(f"cluster={cluster}", *more) for cluster, more in options]
    mib = [prism.memory(job).ranks[0].parts["libraries"] / 2**20 for job in jobs]
    assert mib == [64, 80, 92, 220]


def test_logits_are_on_the_last_rank_only():
    memory = prism.memory(_job())
    logits = 6 * 2048 * 51200 / 8  # Float32, and the 16 bits that they came in.
    assert [rank.parts.get("logits", 0.0) for rank in memory.ranks] == [0.0] * 7 + [logits]


@pytest.mark.parametrize(
    ("loss", "each"),
    [
        ("eager", 16),  # Over a split vocabulary, as by DTensor.
        ("eager-named", 14),
        ("eager-float32", 18),
        ("vocab-parallel", 6),
        ("compiled", 4),
        ("fused", 2),
    ],
)
def test_logits_by_the_loss(loss, each):
    """Of all logits, or of those of a piece of the tokens."""
    kept = ("schedule.kind=1f1b", "schedule.virtual_stages=1", "model.vocab_size=6553600")
    for chunks in (1, 4):
        job = _job(*kept, f"training.loss={loss}", f"training.loss_chunks={chunks}")
        assert prism.memory(job).ranks[-1].parts["logits"] == each * 2048 * 819200 / chunks


@pytest.mark.parametrize(("dtype", "each"), [("fp8", 1), ("mxfp8", 1 + 1 / 32), ("bf16", 2)])
def test_inputs_of_narrow_products_are_kept_as_they_were_multiplied(dtype, each):
    """The outputs of norms and of the activation, and once more the output of attention, which its
    own backward needs in 16 bits. A router reads the output of a norm as it is.
    """
    one = ("schedule.kind=1f1b", "schedule.virtual_stages=1", "schedule.num_microbatches=1")
    one += (f"training.dtype={dtype}", "training.narrow_inputs=true", "model.dropout=false")
    one += ("cluster=hgx-b200", "num_nodes=8", "training.recompute=none")
    states = 12 * 2048 * 12288 / 8  # Of all layers of a rank.
    parts = prism.memory(_job(*one)).ranks[1].parts
    assert parts["norm"] == 2 * (2 + each) * states
    assert parts["attention"] == (3 * 2 + 2 + (each < 2) * each) * states
    assert parts["mlp"] == (2 + each) * 4 * states
    wide = prism.memory(_job(*one, "training.narrow_inputs=false")).ranks[1].parts
    assert [wide[name] / states for name in ("norm", "attention", "mlp")] == [8, 8, 16]
    experts = prism.memory(_job(*one, "model=mixtral-8x7b")).ranks[1]
    states, ratio = 4 * 2048 * 4096 / 8, 14336 / 4096
    assert experts.parts["norm"] == (2 + each + 2 + 2) * states
    assert experts.parts["experts"] == 2 * 8 * (each + 4 * ratio / 8 + each * ratio / 8) * states


def test_an_overlapped_pair_holds_what_it_holds_layer_by_layer():
    """A layer of its backward lets go as a layer of its forward keeps."""
    stages = [StageMemory({}, {"x": 1.0}, {}, {"workspace": 0.25}, {})]
    pairs = ["0F0", "(0F1;0B0)OVERLAP_F_B", "(0F2;0B1)OVERLAP_F_B", "0B2"]
    assert _peaks(prism.CustomSchedule([pairs], [0]), stages) == [{"x": 1.0, "workspace": 0.25}]


def test_heads_that_predict_further_tokens_compute_their_losses_one_by_one():
    of_one = 2048 * 51200 / 8
    for heads, bytes_of_logit in ((1, 6), (2, 4 + 6), (3, 8 + 6)):
        parts = prism.memory(_job(f"model.num_mtp_layers={heads - 1}")).ranks[-1].parts
        assert parts["logits"] == bytes_of_logit * of_one


def test_a_split_backward_keeps_until_its_weights():
    stages = [StageMemory({}, {"x": 1.0}, {}, {"workspace": 0.25}, {})]
    whole = prism.CustomSchedule([["0F0", "0F1", "0B0", "0F2", "0B1", "0B2"]], [0])
    assert _peaks(whole, stages) == [{"x": 2.0, "workspace": 0.25}]
    tokens = ["0F0", "0F1", "0I0", "0F2", "0W0", "0I1", "0W1", "0I2", "0W2"]
    assert _peaks(prism.CustomSchedule([tokens], [0]), stages)[0]["x"] == 3.0


def test_devices_have_what_drivers_report():
    reported = (pathlib.Path(__file__).parent / "data/device_memory.toml").read_text()
    ranges = tomllib.loads(reported)
    assert {*ranges} == {*list_names("device")}
    for name, (least, most) in ranges.items():
        assert least <= load_device(name).memory_bytes / _GIB <= most, name


def test_usable_is_what_the_fullest_run_had_allocated():
    """Of one H200, without communicators: of what is free, the most that a run had allocated."""
    found = prism.memory(load_job("dit-xl-2-a100-8", ["cluster=dgx-h200", "layout.dp=1"]))
    assert found.device_bytes == 150_109_880_320
    assert found.reserved["communicators"] == 0
    assert found.device_bytes - found.reserved["context"] == 149_557_477_376
    assert found.usable_bytes == pytest.approx(147_105_245_696, rel=1e-12)
    full = RankMemory(0, found.usable_bytes, {})
    assert msgspec.structs.replace(found, ranks=(full,)).fits
    over = msgspec.structs.replace(full, bytes=full.bytes + 1)
    assert not msgspec.structs.replace(found, ranks=(full, over)).fits


@pytest.mark.parametrize(
    ("layout", "pairs", "more", "far_pairs", "far"),
    [
        ("tp=8 pp=8 dp=1", 0, 1, 0, 1),
        ("tp=8 pp=4 dp=2", 0, 1, 1, 1),
        ("tp=4 pp=4 cp=2 dp=2", 1, 1, 0, 2),  # The replicas of the parameters are cp times dp.
        ("tp=1 pp=1 dp=64", 0, 0, 0, 1),
    ],
)
def test_each_group_of_a_layout_has_a_communicator(layout, pairs, more, far_pairs, far):
    """Those beyond a node of A100 have channels for 8 x 25 of the 300 GB/s within it."""
    degrees = [f"layout.{degree}" for degree in layout.split()]
    plain = ["schedule.kind=1f1b", "schedule.virtual_stages=1", "training.sequence_parallel=false"]
    found = prism.memory(_job(*plain, *degrees))
    assert found.reserved["communicators"] == pytest.approx(
        (544 * (pairs + far_pairs * 2 / 3) + 688 * (more + far * 2 / 3)) * 2**20
    )
    parts = sum(found.reserved.values())
    assert found.usable_bytes == pytest.approx(found.device_bytes - parts, rel=1e-12)


def test_memory_prints_what_is_needed_and_what_is_usable(answered):
    memory = prism.memory(load_job("megatron-175b-a100-64"))
    found = answered(["memory", "megatron-175b-a100-64", "--json"])
    assert found["usable_bytes"] == memory.usable_bytes
    assert [*found["reserved"]] == ["context", "communicators", "fragmentation"]
    assert found["fits"] is (max(rank["bytes"] for rank in found["ranks"]) <= memory.usable_bytes)
    said = answered(["memory", "megatron-175b-a100-64"])
    for size in (memory.fullest.bytes, memory.device_bytes, memory.usable_bytes):
        assert f"{size / _GIB:.2f}" in said
    assert all(f"{name} {size / _GIB:.2f}" in said for name, size in memory.reserved.items())


@pytest.mark.parametrize("name", list_names("job"))
def test_shipped_jobs_fit(name):
    job = load_job(name)
    memory = prism.memory(job)
    assert len(memory.ranks) == job.layout.pp
    # A file of one that does not says what is not modelled, and is not refused.
    assert memory.fits == (not job.allow_oom)
    check_memory(job)
    for rank in memory.ranks:
        assert rank.bytes == pytest.approx(sum(rank.parts.values()))
        assert min(rank.parts.values()) > 0


# Of few sequences, so that there are few layouts.
_ONE_EACH = (
    "layout.tp=1",
    "layout.dp=8",
    "schedule.num_microbatches=1",
    "training.microbatch_size=1",
)


def test_advice_is_the_best_layout_that_fits_on_the_same_gpus():
    """The first of a search by mean, as `--set`s of the job."""
    given = ["layout.tp=1", "layout.dp=4", "model.num_layers=24", *_ONE_EACH[2:]]
    job: Any = load_job("megatron-22b-a100-8", given)
    found: Any = best_on_same_gpus(job, math.inf)
    changes = changes_to(job, found)
    sets = [_as_set(key, value).removeprefix("--set ").strip('"') for key, value in changes.items()]
    kept = [text for text in given if text.partition("=")[0] not in changes]
    changed = load_job("megatron-22b-a100-8", [*kept, *sets])
    assert changed == with_values(job, changes)
    assert changed.layout.world_size == 4
    assert changed.batch_size == job.batch_size
    space = prism.LayoutSpace(recompute=("none", "selective", "full"))
    asked = {"training": job.training, "batch_size": job.batch_size, "space": space}
    listed = prism.enumerate_layouts(job.model, job.cluster, 4, **asked, any_memory=True)
    options = {"num_samples": None, "top": 1, "memory_margin": 0.05}
    best = prism.rank_layouts(listed, prism.Mean(), **options).layouts[0]
    assert prism.predict(changed).mean == pytest.approx(best.prediction.mean, rel=1e-12)
    assert prism.memory(changed).fits


def test_experts_are_dealt_where_only_that_fits():
    """DeepSeek-V2-Lite on eight GPUs, which has no other small change that fits."""
    changes = ["model=deepseek-v2-lite", "cluster=dgx-h100", "num_nodes=1", "layout.pp=1"]
    changes += _ONE_EACH
    changes += ["schedule.kind=1f1b", "schedule.virtual_stages=1", "training.sequence_length=8192"]
    changes += ["training.software=megatron-bridge-2025"]
    job = load_job("qwen3-235b-h100-256", [*changes, "layout.ep=1"])
    with pytest.raises(ValueError, match=r"usable; use `.*--set layout\.ep=\d") as raised:
        check_memory(job)
    sets = re.findall(r"--set (\S+=[^`\s]+)", str(raised.value))
    replaced = {text.partition("=")[0] for text in sets}
    kept = [text for text in changes if text.partition("=")[0] not in replaced]
    found = load_job("qwen3-235b-h100-256", [*kept, *sets])
    memory, seconds = prism.memory(found), prism.predict(found).mean
    assert memory.fits
    assert f"({memory.fullest.bytes / _GIB:.1f} GiB, {seconds:.4g} s a step)" in str(raised.value)


def test_layers_of_stages_are_given_anew_with_other_stages():
    listed = "schedule.layers_per_stage=[12,12,12,12]"
    plain = ["schedule.kind=1f1b", "schedule.virtual_stages=1", "layout.tp=2", "layout.pp=4"]
    job = load_job("megatron-22b-a100-8", [*plain, listed, "layout.dp=1"])
    other = load_job("megatron-22b-a100-8", ["layout.tp=4", "layout.pp=2", "layout.dp=1"])
    changes = changes_to(job, other)
    assert changes["schedule.layers_per_stage"] == (24, 24)
    assert _as_set("schedule.layers_per_stage", (24, 24)) == (
        '--set "schedule.layers_per_stage=[24,24]"'
    )
    assert prism.memory(with_values(job, changes)) == prism.memory(other)


def test_a_degree_of_experts_stays_where_a_layout_has_the_same():
    job = load_job("deepseek-v3-gb200-512", ["training.recompute=none"])
    other = with_values(job, {"training.recompute": "full"})
    assert job.layout.etp != job.layout.tp
    assert changes_to(job, other) == {"training.recompute": "full"}
    assert changes_to(job, with_values(other, {"layout.etp": None}))["layout.etp"] == job.layout.tp


def test_commands_refuse_what_compile_job_warns_of(monkeypatch, capsys):
    monkeypatch.setattr("prism_jax.layouts._advice.best_on_same_gpus", lambda job: None)
    changes = ["layout.tp=1", "layout.dp=8"]
    words = [word for text in changes for word in ("--set", text)]
    for command in (["simulate"], ["predict"], ["sweep", "--over", "kernels.gemm.sigma=0.1,0.2"]):
        few = ["--samples", "8"] * (command != ["predict"])
        assert main([*command[:1], "megatron-22b-a100-8", *command[1:], *words, *few]) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert len(said.err.splitlines()) == 1
        assert "use more GPUs, as no layout that was looked at fits these, or go on" in said.err
    job = load_job("megatron-22b-a100-8", changes)
    with pytest.warns(prism.OutOfMemoryWarning, match=r"needs [\d.]+ GiB on pipeline rank 0, and"):
        prism.compile_job(job)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prism.compile_job(load_job("megatron-22b-a100-8"))
        prism.compile_job(msgspec.structs.replace(job, allow_oom="It ran."))


def test_a_job_that_says_why_it_ran_goes_on(tmp_path, monkeypatch, answered):
    """`predict`, `simulate` and `memory` print the step time, the memory, and the reason."""
    monkeypatch.setattr("prism_jax.layouts._advice.best_on_same_gpus", lambda job: None)
    why = "It ran with something that is not modelled."
    job, path = (
        load_job("megatron-22b-a100-8", ["training.microbatch_size=32"]),
        tmp_path / "a.toml",
    )
    prism.save_job(msgspec.structs.replace(job, allow_oom=why), path)
    assert load_job(path).allow_oom == why
    for command in (["predict"], ["simulate", "--samples", "1024"], ["memory"]):
        words = [command[0], str(path), *command[1:]]
        found = answered([*words, "--json"])
        assert found["fits"] is False
        assert "step_time_s" in found or "ranks" in found
        said = answered(words)
        assert re.search(r"GiB [\d.]+ are usable \(less context .*\)\. " + why, said)
    changed = ["predict", str(path), "--set"]
    assert main([*changed, "training.microbatch_size=16"]) == 2  # It did not run like this.
    answered([*changed, "kernels.gemm.sigma=0.1"])


@pytest.mark.parametrize(
    ("overlaps", "instead"),
    [("true", "training.accumulate_gradients=true"), ("false", "training.zero=1")],
)
def test_notes_give_the_cost_of_sharded_gradients_in_a_pipeline(overlaps, instead):
    name = "gpt3-175b-h100-768"
    kept = [f"training.overlap_grad_reduce={overlaps}"]
    job, other = (load_job(name, [*kept, *more]) for more in (["training.zero=2"], [instead]))
    if "accumulate" in instead:
        other = load_job(name, [*kept, instead, "training.zero=2"])
    (note,) = costly_keys(job)
    longer = prism.predict(job).mean / prism.predict(other).mean - 1
    assert f"{100 * longer:.0f} % longer than `{instead.replace('=', ' = ')}` would" in note
    assert costly_keys(other) == ()


def test_a_job_that_does_not_fit_goes_on_where_allowed(answered):
    words = ["megatron-22b-a100-8", "--set", "training.microbatch_size=32", "--allow-oom"]
    found = answered(["simulate", *words, "--samples", "1024", "--json"])
    assert found["step_time_s"]["mean"] > 0
    assert found["fits"] is False
    assert answered(["memory", *words[:-1], "--json"])["fits"] is False
    assert "does not fit a100-80g-sxm" in answered(["memory", *words[:-1]])


def test_a_job_without_a_model_has_no_memory():
    job = msgspec.structs.replace(_job(), model=None)
    refusal(lambda: prism.memory(job), "add `model`")
    check_memory(job)


@pytest.mark.skipif(
    not _DATA.is_dir() and os.environ.get("CI") != "true",
    reason="measurements are not beside the checkout",
)
def test_peaks_that_megatron_recorded():
    """The last rank's allocator at its fullest, for the arguments that can be expressed."""
    from validation.memory import golden_rows

    rows = list(golden_rows(_DATA / "megatron_golden"))
    errors = [abs(row["predicted"] / row["measured"] - 1) for row in rows if "predicted" in row]
    assert len(errors) > 0.7 * len(rows)
    assert statistics.median(errors) <= 0.03
    assert sum(error <= 0.20 for error in errors) >= 0.9 * len(errors)
    assert all(row["reason"] for row in rows if "predicted" not in row)
    assert all(math.isfinite(error) for error in errors)


def test_a_job_of_very_many_ops_that_cannot_fit_is_refused_by_few_of_them(monkeypatch):
    asked = []

    def order_of(*options):
        asked.append(prism.schedule.order_of(*options))
        return asked[-1]

    monkeypatch.setattr("prism_jax.prediction._memory.order_of", order_of)
    monkeypatch.setattr("prism_jax.layouts._advice.best_on_same_gpus", lambda job: None)
    changes = ["layout.pp=384", "schedule.num_microbatches=2000", "model.num_layers=384"]
    job = prism.load_job("megatron-22b-a100-8", ["cluster.num_nodes=384", *changes])
    refusal(lambda: prism.layouts.check_memory(job), "needs at least ... GiB on pipeline rank 0")
    assert 0 < sum(one.num_ranks * one.num_microbatches for one in asked) <= 200_000


@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize(
    "kind", ["1f1b", "gpipe", "interleaved-1f1b", "looped-bfs", "zb-h1", "zbv", "dual-pipe-v"]
)
def test_fewer_microbatches_need_no_more_memory(kind, zero):
    """By which jobs of very many ops are refused without looking at all of them."""
    virtual = 3 if kind in ("interleaved-1f1b", "looped-bfs") else 2 if kind[-1] == "v" else 1
    kept = (f"schedule.kind={kind}", f"schedule.virtual_stages={virtual}", f"training.zero={zero}")
    kept += ("training.overlap_grad_reduce=true", "training.accumulate_gradients=true")
    memories = [prism.memory(_job(*kept, f"schedule.num_microbatches={n}")) for n in (16, 32, 128)]
    needed = [[rank.bytes for rank in memory.ranks] for memory in memories]
    assert (np.diff(needed, axis=0) >= 0).all()
