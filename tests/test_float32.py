"""Training in float32: the bytes of what is held, moved and sent, and the time of products."""

import csv
import pathlib
import re
import statistics
from collections import Counter
from typing import Any

import msgspec
import pytest

import prism_jax as prism
from prism_jax.data import load_device, make_job
from prism_jax.importers import import_job
from prism_jax.lowering import job_parts
from prism_jax.workload import memory_of_stages

from .helpers import kernels_of, lower_job


_SMALL = ("model=llama-3.1-8b", "model.num_layers=4", "layout.tp=2", "layout.pp=2", "layout.dp=4")
_SMALL += ("schedule.kind=1f1b", "schedule.virtual_stages=1", "num_nodes=2")
_SMALL += ("training.attention=unfused", "training.gradient_dtype=fp32")


_PARAMETERS = 4 * (4096 * (4096 * 2 + 1024 * 2) + 3 * 4096 * 14336 + 2 * 4096)
_PARAMETERS += 2 * 128256 * 4096 + 4096  # The ends, and the last norm.


def _job(dtype, *overrides):
    changes = (*_SMALL, f"training.dtype={dtype}", *overrides)
    return prism.load_job("gpt3-175b-h100-768", changes)


def _stages(job):
    return memory_of_stages(job_parts(job), range(job.layout.pp))


def test_a_parameter_takes_sixteen_bytes_of_which_none_is_a_copy():
    one = ("layout.tp=1", "layout.pp=1", "layout.dp=16")
    number = _PARAMETERS
    for dtype in ("fp32", "tf32"):
        (stage,) = _stages(_job(dtype, *one, "training.zero=0"))
        held = {name: stage.held[name] for name in ("parameters", "gradients", "optimizer")}
        assert held == {"parameters": 4 * number, "gradients": 4 * number, "optimizer": 8 * number}
        assert stage.copied == 0
        (sharded,) = _stages(_job(dtype, *one, "training.zero=1"))
        assert sharded.held["optimizer"] == 8 * number / 16
    (half,) = _stages(_job("bf16", *one, "training.zero=0"))
    assert half.held["parameters"] + half.held["optimizer"] == 14 * number


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_activations_take_twice_the_bytes(recompute):
    """But not those of the loss, whose logits are no longer cast, and those of words."""
    jobs = (_job(dtype, f"training.recompute={recompute}") for dtype in ("bf16", "tf32"))
    for half, whole in zip(*map(_stages, jobs), strict=True):
        kept = dict(half.kept)
        assert whole.kept == {
            name: size * (1 if name in ("embedding", "logits") else 2)
            for name, size in kept.items()
        }


def test_the_loss_holds_logits_in_place():
    """Megatron-LM's: 16-bit logits and a float32 softmax, or the softmax in place of the logits."""
    last = [_stages(_job(dtype, "training.loss=vocab-parallel"))[-1] for dtype in ("bf16", "tf32")]
    half, whole = (one.kept["logits"] + one.forward["logits"] for one in last)
    assert half == pytest.approx(1.5 * whole, rel=1e-12)


def _moved(block):
    """The bytes of each kind of collective, and of kernels that only move, in a block."""
    found: Counter[str] = Counter()
    for kernel, times in kernels_of(block).items():
        if (size := re.match(r"(\d+)B", kernel.size)) and kernel.kind != "loss":
            found[f"{kernel.kind} {kernel.group}"] += times * int(size[1])
    return found


def test_what_is_sent_and_moved_has_twice_the_bytes():
    """But gradients, and sums in float32."""
    half, whole = (lower_job(_job(dtype)) for dtype in ("bf16", "tf32"))
    for phase in ("forward", "backward"):
        for before, after in zip(getattr(half, phase), getattr(whole, phase), strict=True):
            narrow, wide = _moved(before), _moved(after)
            embedding = narrow.pop("embedding ", 0), wide.pop("embedding ", 0)
            assert narrow.pop("all_reduce tp", 0) == wide.pop("all_reduce tp", 0)  # Of the loss.
            assert wide == {name: 2 * size for name, size in narrow.items()}
            # A backward adds a gradient of its dtype to a row in float32, 10 and 12 bytes.
            assert embedding[1] == (2 if phase == "forward" else 1.2) * embedding[0]
    sent = [{k.size for k in work.send_recv.values()} for work in (half, whole)]
    assert {2 * int(size.split("B")[0]) for size in sent[0]} == {
        int(size.split("B")[0]) for size in sent[1]
    }
    reduced = [_moved(work.reduce_scatter[0]) for work in (half, whole)]
    assert reduced[0] == reduced[1]
    narrow, wide = (_moved(work.tail) for work in (half, whole))
    assert wide["all_gather dp"] == 2 * narrow["all_gather dp"]
    # An update reads the gradient, the parameter and two moments, and writes all but the gradient;
    # of 16 bits also a copy. Before it, the norm reads gradients.
    assert wide["optimizer "] * (4 + 30) == narrow["optimizer "] * (4 + 28)


@pytest.mark.parametrize(("dtype", "peak"), [("tf32", 494.7e12), ("fp32", 66.9e12)])
def test_a_product_reaches_what_one_in_16_bits_does_that_takes_as_long(dtype, peak):
    costs = job_parts(_job(dtype))
    device = costs.cluster.device
    assert device.peak_flop_per_s[dtype] == peak
    table = costs.kernels.find_efficiency("gemm", "bf16")
    flop = 2 * 4096**3
    as_long = flop * device.peak_flop_per_s["bf16"] / peak
    seconds = flop / (table.at(as_long) * peak) + table.latency_s
    kernel = costs.gemm(4096, 4096, 4096)
    assert kernel.mean == pytest.approx(costs.kernels.compute * seconds, rel=1e-12)
    assert any(f"in {dtype} is known" in note for note in _job(dtype).notes)


def test_what_has_no_float32_is_refused():
    for key, values, allowed in (
        ("attention", ("flash-1", "flash-2", "cudnn"), "'flash' or 'unfused'"),
        ("weights", ("bf16",), "'fp32' or 'copied'"),
        ("gather_dtype", ("bf16", "fp16", "fp8"), "'fp32'"),
    ):
        for value in values:
            said = rf"`training\.{key}` is '{value}', which is not for .* give {allowed}\.$"
            with pytest.raises(ValueError, match=said):
                _job("tf32", f"training.{key}={value}")
    plain = ("training.software=pytorch-2026", "layout.tp=1", "layout.pp=1", "layout.dp=16")
    job = _job("fp32", *plain, "training.zero=0")
    assert any("no products in fp32" in note for note in job.notes)
    parts = prism.memory(job).fullest.parts
    assert parts["parameters"] + parts["optimizer"] == 12 * _PARAMETERS


def test_a_script_that_is_asked_for_float32_is_as_one_in_it():
    for script in ("float32.sh", "megatron_llama3_8b.sh"):
        path = pathlib.Path(__file__).parent / "data/scripts" / script
        for said, dtype in (("float32", "fp32"), ("'tf32'", "tf32")):
            imported = import_job(path, 16, overrides=[f"training.dtype={said}"])
            training = imported.job.training
            assert (training.dtype, training.attention) == (dtype, "unfused")
            assert any(f"(as asked): products in {dtype}" in note for note in imported.notes)


# Of the same compute as the GPUs of the rows.
_DEVICES = {"A100-80GB-PCIe": "a100-80g-pcie", "A100-40GB-SXM": "a100-40g-sxm"}
_DEVICES |= {"V100-32GB-PCIe": "v100-32g"}


def test_measured_steps_in_float32(shared):
    """NeuSight's steps of BERT, GPT-2, GPT-3 and OPT without TF32; those without an optimizer, and
    a cluster by the device alone.
    """
    rows = csv.DictReader((shared / "data/steps/more_machines.csv").read_text().splitlines())
    ratios = []
    for row in rows:
        known = row["gpu_type"] in _DEVICES and row["dtype"] == "fp32" and not row["experts"]
        if not known or "doubtful" in row["note"]:
            continue
        sizes = {"hidden_size": "hidden", "num_heads": "heads", "ffn_size": "ffn"}
        sizes |= {"vocab_size": "vocab", "num_layers": "layers", "max_positions": "seq"}
        model = {key: int(float(row[name])) for key, name in sizes.items()}
        training = {"microbatch_size": int(float(row["micro_batch"])), "dtype": "fp32", "zero": 0}
        training |= {"sequence_length": int(row["seq"]), "sequence_parallel": False}
        training |= {"attention": "unfused", "loss": "eager"}
        raw = {
            "model": model | {"dropout": True},
            "layout": {key: int(row[key]) for key in ("tp", "pp", "dp")},
            "schedule": {"kind": "1f1b", "num_microbatches": 1},
            "training": training,
            "cluster": "dgx-a100-40g",
            "num_nodes": 1,
        }
        job: Any = make_job(raw, pathlib.Path("a row"))
        device = load_device(_DEVICES[row["gpu_type"]])
        cluster = msgspec.structs.replace(job.cluster, device=device)
        step = prism.predict(msgspec.structs.replace(job, cluster=cluster))
        without = "no optimizer" in row["note"]
        seconds = step.mean - without * step.breakdown["optimizer"]
        ratios.append(seconds / float(row["step_time_s"]))
    assert len(ratios) == 10
    assert statistics.median(abs(ratio - 1) for ratio in ratios) < 0.05
