"""Steps on AMD's and Google's chips, as their published rows say them; see `test_cluster.py` for
the torus.
"""

import csv
from typing import Any

import pytest

from prism_jax.data import load_job
from prism_jax.prediction import predict
from validation.machines import machine_rows, machine_table
from validation.published_jobs import of_steps


_ROW = {"source": "AI-Hypercomputer/tpu-recipes", "model": "Llama-3.1-8B", "layers": "32.0"}
_ROW |= {"hidden": "4096.0", "heads": "32", "kv_heads": "8", "ffn": "14336", "vocab": "128256"}
_ROW |= {"seq": "8192", "gpus": "512.0", "gpu_type": "TPU-v6e", "tp": "1", "pp": "1", "cp": "1"}
_ROW |= {"dp": "", "micro_batch": "3.0", "global_batch": "1536.0", "recompute": "full"}
_ROW |= {"dtype": "bf16", "zero": "FSDP", "step_time_s": "3.5", "family": "tpu", "note": ""}
_JOB = ("layout.tp=1", "layout.pp=1", "schedule.num_microbatches=1", "schedule.virtual_stages=1")
_JOB += ("schedule.kind=1f1b", "training.zero=3", "training.software=maxtext-tpu")


def _rows(tmp_path, *rows):
    (tmp_path / "steps").mkdir(exist_ok=True)
    every = dict.fromkeys(name for row in rows for name in row)
    with (tmp_path / "steps" / "more_machines.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, every, restval="")
        writer.writeheader()
        writer.writerows(rows)
    return machine_rows(tmp_path)


def test_a_block_of_steps_has_its_evaluation(tmp_path):
    note = "a block trains 16 steps (24,576 sequences) and then evaluates {} sequences (forward)"
    counts = ("12,288", "24,576")
    rows = [_ROW, *(_ROW | {"note": note.format(count)} for count in counts)]
    found = _rows(tmp_path, *rows)["rows"]
    alone, half, whole = (row["predicted"] for row in found)
    assert alone < half < whole
    # A forward is a quarter of a step that computes each layer's forward twice.
    assert 2 * (half - alone) == pytest.approx(whole - alone)
    assert (whole - alone) / alone == pytest.approx(0.25, abs=0.04)


def test_chips_are_named_and_others_stand_apart(tmp_path):
    fp8 = _ROW | {"gpu_type": "MI350X", "dtype": "fp8", "gpus": "8", "global_batch": "24"}
    fp8 |= {"source": "mlcommons/training_results_v5.1 X/results", "zero": "1", "micro_batch": "1"}
    odd = [_ROW | {"gpu_type": "H100"}, *(_ROW | {"dtype": dtype} for dtype in ("int3", ""))]
    found = _rows(tmp_path, _ROW, fp8, *odd)
    assert [row["table"] for row in found["rows"]] == ["TPU v6e", "MI350X"]
    assert len(found["others"]) == 1
    reasons = [row["reason"] for row in found["refused"]]
    assert reasons == ["no dtype int3", "`dtype` is not given"]
    assert all(row["low"] < row["predicted"] < row["high"] for row in found["rows"])
    assert "| dense | MI350X | 1 |" in machine_table(found)


@pytest.mark.parametrize(
    ("policy", "modules"),
    [
        ("all but mlpwo", None),
        ("all but query_proj key_proj", ("layernorm", "mlp", "moe", "fused_attn")),
        ("all but attention context and projections", ("layernorm", "mlp", "moe")),
    ],
)
def test_what_a_policy_does_not_keep_is_made_again(policy, modules):
    row = _ROW | {"recompute": "selective", "recompute_modules": policy, "offload": "x to the host"}
    training: Any = of_steps({**dict.fromkeys(("vpp", "seq_parallel"), ""), **row}).training
    assert training.recompute == ("selective" if modules else "full")
    assert modules is None or training.recompute_modules == modules


def test_slices_hold_copies_and_8_bits_are_8_bits():
    row = {**dict.fromkeys(("vpp", "seq_parallel"), ""), **_ROW}
    training: Any = of_steps(row | {"note": "two slices over a network", "dtype": "int8"}).training
    assert (training.optimizer_instances, training.dtype) == (2, "fp8")


def test_fused_attention_and_the_first_matrices_of_an_mlp_are_made_again():
    def seconds(*words):
        found = predict(load_job("llama-3-70b-h100-512", [*_JOB, *words])).breakdown
        return found["attention"], found["gemm"]

    kept = seconds('training.recompute="none"')
    forward = seconds("training.forward_only=true")
    again = 'training.recompute="selective"'
    attention = seconds(again, 'training.recompute_modules=["fused_attn"]')
    assert attention[0] == pytest.approx(kept[0] + forward[0])
    assert attention[1] == pytest.approx(kept[1])
    modules = 'training.recompute_modules=["mlp"]'
    whole = seconds(again, modules, "training.recompute_early_stop=false")
    first = seconds(again, modules, "training.recompute_early_stop=true")
    # Two of the three matrices of a gated MLP make what the third reads.
    assert (first[1] - kept[1]) / (whole[1] - kept[1]) == pytest.approx(2 / 3, abs=0.02)
