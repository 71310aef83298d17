"""Plain PyTorch on one GPU or a few: operators as kernels of their own, what autograd keeps, a host
that launches each kernel, and the collectives of DDP, FSDP and ZeRO.
"""

import csv
import dataclasses
import functools as ft
import itertools as it
import json
import math
import pathlib
from collections import Counter
from typing import Any

import jax
import msgspec
import pytest

from benchmarks.saved_tensors import LENGTH, SEQUENCES, families
from prism_jax import data
from prism_jax.diagnosis import calibrated_to_profile, kernel_classes
from prism_jax.engine import simulate
from prism_jax.importers import import_job
from prism_jax.lowering import job_parts
from prism_jax.prediction import fits, memory, predict
from prism_jax.program import compile_job
from prism_jax.trace import contents, read_rank_traces
from prism_jax.workload import Costs, lower
from prism_jax.workload._architecture import count_parameters, ends_of, layers_of
from prism_jax.workload._block import Kernel, Segments
from prism_jax.workload._listed import Listed, _operators_of, listed, tensors_of, waits_for_host
from prism_jax.workload._parts import block_mean, rows_of, segment
from prism_jax.workload._units import backward_part, forward_part
from prism_jax.workload.modules import AbstractModule, Operator, Parameters
from validation.plain import job_of, plain_rows, plain_table


ROOT = pathlib.Path(__file__).parents[1]
LLAMA = {"num_heads": 32, "num_kv_heads": 8, "head_size": 64, "norm": "rmsnorm", "bias": False}
LLAMA |= {"hidden_size": 2048, "ffn_size": 8192, "num_layers": 16, "vocab_size": 128256}
LLAMA |= {"activation": "swiglu", "position": "rotary"}
GPT2 = {"hidden_size": 1600, "ffn_size": 6400, "num_layers": 48, "num_heads": 25}
GPT2 |= {"vocab_size": 50257, "max_positions": 1024, "activation": "gelu_new"}


def _job(model: dict[str, Any], changes: dict[str, Any] | None = None, **training: Any) -> Any:
    """A job of one H200, or of more with `changes` of its layout."""
    joined = {"separate_products": False} if "max_positions" in model else {}
    sizes = {"microbatch_size": 2, "sequence_length": 1024, "software": "pytorch-2026"}
    raw = {
        "model": {"name": "model", **model},
        "cluster": "dgx-h200",
        "num_nodes": 1,
        "layout": {"dp": 1},
        "schedule": {"kind": "1f1b", "num_microbatches": 1},
        "training": {**sizes, **joined, **training},
    }
    return data.make_job(raw, pathlib.Path("job.toml"), changes or {})


def _operators(costs: Any, part: Any) -> list[Any]:
    """The operators of the modules of a part."""
    modules = (one for one in listed(costs, part).modules if isinstance(one, Listed))
    return [step for module in modules for step in _operators_of(costs, module)]


def _launched(segments: Any) -> int:
    return sum(n for one in segments for row, _ in rows_of(one) for _, n in row)


def test_a_layer_runs_as_many_kernels_as_in_the_profile():
    costs = job_parts(_job(LLAMA))
    layer = layers_of(costs.model)[0]
    assert _launched(forward_part(costs, layer)) == 48
    # The backward of attention is one kernel here; the profile has three more of cuDNN's.
    assert _launched(backward_part(costs, layer, False)) == 95 - 3


def test_norms_of_queries_and_of_keys_are_kernels_of_their_own():
    layers = [{"modules": ["attention", "mlp"], "repeat": 16}]
    costs = job_parts(
        _job({**LLAMA, "modules": {"attention": {"qk_norm": True}}, "layers": layers})
    )
    layer = layers_of(costs.model)[0]
    assert _launched(forward_part(costs, layer)) == 48 + 2 * 8
    assert _launched(backward_part(costs, layer, False)) == 95 - 3 + 2 * 17
    assert tensors_of(costs, ((layer, 16),)) == 16 * (9 + 2)


@pytest.mark.parametrize("software", ["pytorch-2026", "pytorch-compile-2026"])
def test_attention_of_wider_heads_is_faster_with_a_mask_and_without(software):
    narrow, wide = (
        predict(_job({**LLAMA, **sizes}, software=software, sequence_length=8192)).breakdown
        for sizes in ({}, {"num_heads": 16, "num_kv_heads": 4, "head_size": 128})
    )
    assert 1.2 < narrow["attention"] / wide["attention"] < 1.35


@pytest.mark.parametrize(
    ("model", "weights", "software", "by_hand"),
    [
        (LLAMA, "fp32", "pytorch-2026", lambda h, kv, f: 30 * h + 4 * kv + 8 * f),
        (LLAMA, "bf16", "pytorch-2026", lambda h, kv, f: 20 * h + 4 * kv + 8 * f),
        (GPT2, "fp32", "pytorch-2026", lambda h, kv, f: 20 * h + 16 * f),
        (GPT2, "bf16", "pytorch-2026", lambda h, kv, f: 16 * h + 10 * f),
        (LLAMA, "fp32", "pytorch-compile-2026", lambda h, kv, f: 16 * h + 4 * h + 6 * f),
    ],
)
def test_what_a_layer_keeps_is_the_sum_of_the_tensors_of_its_operators(
    model, weights, software, by_hand
):
    costs = job_parts(_job(model, weights=weights, software=software))
    part = listed(costs, layers_of(costs.model)[0])
    sizes: Counter[str] = Counter()
    for module in part.modules:
        sizes.update(module.activations(costs))
    casts, tokens = sizes.pop("casts", 0), costs.tokens
    kv = 512 if model is LLAMA else 0
    # Besides some values for each token: what norms keep of a row.
    rest = sum(sizes.values()) / tokens - by_hand(model["hidden_size"], kv, model["ffn_size"])
    assert 0 <= rest <= 16
    steps = _operators(costs, layers_of(costs.model)[0])
    matrices = sum(step.values["w"] for step in steps if step.matrix)
    assert casts == (2 * matrices if weights == "fp32" else 0)


@pytest.mark.parametrize("activation", ["swiglu", "gelu", "gelu_new", "relu", "squared_relu"])
@pytest.mark.parametrize("weights", ["fp32", "bf16"])
def test_what_is_compiled_keeps_no_more_than_what_is_not(activation, weights):
    stacks = ("pytorch-2026", "pytorch-compile-2026")
    model = GPT2 | {"activation": activation}
    eager, compiled = (memory(_job(model, weights=weights, software=name)) for name in stacks)
    assert compiled.fullest.parts["mlp"] <= eager.fullest.parts["mlp"]


@pytest.mark.parametrize(("weights", "each"), [("fp32", 4), ("bf16", 2)])
def test_states_take_four_values_of_a_parameter(weights, each):
    job = _job(LLAMA, weights=weights)
    number = count_parameters(job.model)
    parts = memory(job).fullest.parts
    assert parts["parameters"] == each * number
    assert parts["optimizer"] == 2 * each * number
    # Gradients are there where the loss is not: with several microbatches.
    several = _job(LLAMA, {"schedule.num_microbatches": 2}, weights=weights)
    assert memory(several).fullest.parts["gradients"] == each * number


def test_with_recomputation_inputs_in_float32_and_the_cast_of_the_head_are_kept():
    parts = memory(_job(LLAMA, recompute="full", sequence_length=4096)).fullest.parts
    tokens, hidden, words = 8192, 2048, 128256 * 2048
    assert parts["checkpoints"] == 16 * 4 * tokens * hidden
    assert parts["casts"] == 2 * words
    assert parts["logits"] == 14 * tokens * 128256


def _host(each: float, blocks: list[tuple[float, int, int]]) -> float:
    """How many ms a GPU waits whose units take so many, with so many kernels, so many times."""
    units = [
        ([segment([Kernel("gemm", f"{i} {k}", ms / n / 1e3) for k in range(n)])], count)
        for i, (ms, n, count) in enumerate(blocks)
    ]
    costs = job_parts(_job(LLAMA, host_forward_s=each / 1e3, host_backward_s=each / 1e3))
    return 1e3 * waits_for_host(costs, [(units, False)])[0]


def test_a_gpu_waits_for_a_host_that_is_behind_and_for_no_other():
    # The host takes 1 ms for each of 30 kernels, whose GPU takes 10 ms: it ends with the host.
    assert _host(1.0, [(1.0, 3, 10)]) == pytest.approx(30 - 10)
    # It is ahead but for the launch of the first unit.
    assert _host(0.1, [(1.0, 3, 10)]) == pytest.approx(0.0, abs=1e-9)
    # What it gains beside a slow unit hides a later row of quick ones.
    slow, quick = (100.0, 10, 1), (0.1, 10, 9)
    assert _host(1.0, [slow, quick]) == pytest.approx(0.0, abs=1e-9)
    assert _host(1.0, [quick, slow]) == pytest.approx(90 - 0.9)


@pytest.mark.slow
def test_two_gpus_wait_for_the_slower_of_two_hosts():
    # The mean of the larger of two normals is 1 / sqrt(pi) of their deviation above theirs.
    laws, means = [], []
    for gpus in (1, 2):
        changes = {"layout.dp": gpus, "schedule.num_microbatches": 4}
        job = _job(LLAMA, changes, microbatch_size=1, sequence_length=2048)
        program = compile_job(job)
        laws.append(simulate(program, num_samples=8192, key=jax.random.key(0)))
        means.append(predict(job).mean)
    one, two = laws
    assert one.mean == pytest.approx(means[0], rel=3e-3)
    assert 0.03 < one.std / one.mean < 0.1
    slower = 1 + one.std / one.mean / math.sqrt(math.pi)
    # Collectives, and GPUs that differ, add a little.
    assert 0 <= two.mean / means[1] - slower < 6e-3


def test_several_short_microbatches_wait_for_the_host_each():
    job = _job(LLAMA, {"schedule.num_microbatches": 4}, microbatch_size=1)
    free = job.replace(**{"training.host_forward_s": 0.0, "training.host_backward_s": 0.0})
    bound, busy = predict(job), predict(free)
    assert bound.breakdown["host"] > 0.2 * bound.mean
    waits = bound.breakdown["host"] - busy.breakdown["host"]
    assert bound.mean == pytest.approx(busy.mean + waits)


def test_each_entry_of_a_list_has_a_rate_and_values_that_are_known():
    for name in data.list_names("list of operators"):
        operators = data.load_operators(name)
        kernels = data.load_kernels(data.load_cluster("dgx-h200", 1), operators)
        rates = {table.kernel for table in kernels.efficiency}
        for model, weights in it.product((LLAMA, GPT2), ("fp32", "bf16")):
            costs = job_parts(_job(model, weights=weights, operators=name))
            for part in (*ends_of(costs.model), layers_of(costs.model)[0]):
                steps = _operators(costs, part)
                for step, phase in it.product(steps, ("forward", "backward", "kept")):
                    for term in operators.terms(weights, step.name, phase):
                        assert term.values in step.values
                        assert phase == "kept" or term.rate in rates


def test_an_entry_of_a_list_that_is_none_is_refused_in_a_sentence(tmp_path):
    path = tmp_path / "own.toml"
    shipped = (ROOT / "kernels/operators/pytorch-2026.toml").read_text()
    path.write_text(shipped.replace('"mixed 10 h"', '"mixed ten h"'))
    with pytest.raises(ValueError, match="`mixed ten h` is no entry of an operator; give a class"):
        _job(LLAMA, operators=str(path))
    path.write_text(shipped.replace('"mixed 10 h"', '"mixed 20 h"'))
    usual = _job(LLAMA, sequence_length=4096)
    slower = _job(LLAMA, sequence_length=4096, operators=str(path))
    assert predict(slower).mean > predict(usual).mean


def test_a_note_says_where_operators_are_fused_after_all():
    assert not _job(LLAMA).notes[1:]
    notes = _job(LLAMA, {"training.dtype": "fp8"}).notes
    assert any("lists of operators have no products in fp8" in note for note in notes)


@pytest.mark.parametrize(("weights", "cast"), [("fp32", 5), ("bf16", 0)])
def test_adapters_read_and_add_to_each_matrix_of_their_own(weights, cast):
    names = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
    adapters = {"rank": 8, "modules": names}
    job = _job(LLAMA, weights=weights, adapters=adapters)
    costs = job_parts(job)
    layer = layers_of(costs.model)[0]._replace(adapters=costs.training.adapters)
    plain = job_parts(_job(LLAMA, weights=weights))
    forward = [_launched(forward_part(one, layer)) for one in (costs, plain)]
    # As a profile on a CPU has them (PEFT 0.21): two casts, two matrices and their casts, a scale
    # and a sum; five of seven inputs are in float32 already if the weights are.
    assert forward[0] - forward[1] == 7 * 8 - cast
    # Nothing is kept for the gradients of the weights that stay, and of each input another copy.
    h, kv, f, r = 2048, 512, 8192, 8
    kept = sum(sum(one.activations(costs).values()) for one in listed(costs, layer).modules)
    casts = 2 * (h * (2 * h + 2 * kv + 3 * f) * (weights == "fp32"))
    adapted = 2 * r * (2 * (h + h) + 2 * (h + kv) + 3 * (h + f))
    by_hand = 8 * h + 4 * h + 4 * kv + 6 * f + 2 * (6 * h + f) + 7 * 2 * r + 8
    assert kept == costs.tokens * by_hand + casts + adapted
    parts = memory(job).fullest.parts
    number = count_parameters(job.model)
    assert parts["frozen"] == (4 if weights == "fp32" else 2) * number
    assert parts["optimizer"] == 2 * parts["parameters"]


def test_attention_with_a_window_reads_a_mask_and_covers_the_whole_square():
    windows = {"modules": {"local": {"kind": "attention", "window": 512}}}
    windows |= {"layers": [{"modules": ["local", "mlp"], "repeat": 16}]}
    for length, masked in ((1024, True), (512, False)):
        costs = [
            job_parts(_job(model, sequence_length=length))
            for model in ({**LLAMA, **windows}, LLAMA)
        ]
        layers = [listed(one, layers_of(one.model)[0]) for one in costs]
        forward = [forward_part(*pair) for pair in zip(costs, layers, strict=True)]
        kept = [
            sum(sum(module.activations(one).values()) for module in layer.modules)
            for one, layer in zip(costs, layers, strict=True)
        ]
        # The mask as values to add, and keys and values for each head of queries.
        assert _launched(forward[0]) - _launched(forward[1]) == 4 * masked
        values = 2 * 2 * 1024 * 2 * (2048 - 512) + 2 * 2 * 1024**2
        assert kept[0] - kept[1] == masked * values
        flop = [
            sum(kernel.flop for part in of for kernel, _ in part.kernels if "x64" in kernel.size)
            for of in forward
        ]
        assert flop[0] == (1 + masked) * flop[1] > 0


def test_layers_of_families_keep_what_pytorch_keeps_and_run_its_operators(tmp_path):
    training = {"per_device_train_batch_size": SEQUENCES, "max_length": LENGTH, "bf16": True}
    (tmp_path / "train.json").write_text(json.dumps(training | {"num_processes": 1}))
    off = {}
    for name, keys in families().items():
        config = keys["config"] | {"num_hidden_layers": 2}
        (tmp_path / "config.json").write_text(json.dumps(config))
        job: Any = import_job([tmp_path / "config.json", tmp_path / "train.json"], 1).job
        for weights in keys.keys() - {"config"}:
            costs = job_parts(job.replace(**{"training.weights": weights}))
            layers = layers_of(costs.model)
            kept = sum(
                sum(module.activations(costs).values())
                for layer in layers
                for module in listed(costs, layer).modules
            )
            measured, *operators = keys[weights]
            size = kept / len(layers) / costs.tokens / measured - 1
            # Without the kernels of attention.
            runs = [
                sum(map(_launched, map(ft.partial(forward_part, costs), layers))) / 2 - 1,
                sum(_launched(backward_part(costs, layer, False)) for layer in layers) / 2 - 1,
            ]
            number = [a - b for a, b in zip(runs, operators, strict=True)]
            wrong = [abs(n) > max(5, 0.1 * of) for n, of in zip(number, operators, strict=True)]
            if abs(size) > 0.015 or any(wrong):
                off[name, weights] = (size, *number)
    assert not off


@dataclasses.dataclass(frozen=True)
class _Gate(AbstractModule):
    """A module whose operators are those of an activation alone."""

    kind = "toy-gate"

    def parameters(self, model: data.Model) -> Parameters:
        return Parameters()

    def forward(self, costs: Costs, before: list[Kernel]) -> Segments:
        return [segment(before)]

    def backward(self, costs: Costs, before: list[Kernel], *, weights: bool = True) -> Segments:
        return [segment(before)]

    def backward_weight(self, costs: Costs) -> Segments:
        return []

    def activations(self, costs: Costs) -> dict[str, float]:
        return {}

    def operators(self, costs: Costs) -> list[Operator]:
        return [Operator("relu", {"f": costs.states})]


def test_a_module_of_another_package_lists_its_operators():
    model = {**LLAMA, "layers": [{"modules": ["toy-gate"], "repeat": 16}]}
    costs = job_parts(_job(model))
    layer = layers_of(costs.model)[0]
    # Six of the norm before it, its own, and the residual.
    assert _launched(forward_part(costs, layer)) == 6 + 1 + 1
    assert _launched(backward_part(costs, layer, False)) == 14 + 1 + 2
    (module,) = listed(costs, layer).modules
    assert module.activations(costs)["toy-gate"] == 2 * costs.states


def test_a_note_names_the_modules_that_lists_of_operators_lack():
    experts = {"kind": "moe", "num_experts": 8, "top_k": 2, "expert_ffn_size": 8192}
    layers = [{"modules": ["attention", "experts"], "repeat": 16}]
    assert not any("lists of operators" in note for note in _job(LLAMA).notes)
    job = _job({**LLAMA, "modules": {"experts": experts}, "layers": layers})
    assert not any("lists of operators" in note for note in job.notes)
    # Autocast leaves them in float32, and so their products.
    narrow = job.replace(**{"training.weights": "bf16"})
    assert predict(job).breakdown["gemm"] > 5 * predict(narrow).breakdown["gemm"]
    layers = [{"modules": ["mla", "mlp"], "repeat": 16}]
    mla = {"kv_lora_rank": 512, "nope_head_size": 128, "rope_head_size": 64, "value_head_size": 128}
    job = _job({**LLAMA, "modules": {"mla": mla}, "layers": layers})
    assert any("lists of operators have none of mla" in note for note in job.notes)
    job = _job({**LLAMA, "head_transforms": 1})
    assert any("none of dense layers of a head" in note for note in job.notes)
    job = _job({**LLAMA, "hyper_connections": 4})
    assert any("lists of operators have none of residual streams" in note for note in job.notes)


def test_each_activation_runs_its_own_kernels():
    numbers = []
    for activation in ("gelu_new", "squared_relu"):
        costs = job_parts(_job({**GPT2, "activation": activation}, weights="bf16"))
        layer = layers_of(costs.model)[0]
        numbers.append(
            (_launched(forward_part(costs, layer)), _launched(backward_part(costs, layer, False)))
        )
    (forward, backward), of_relu = numbers
    # Eight and eleven of `gelu_new`; a relu and a square, and back one and three.
    assert of_relu == (forward - 8 + 2, backward - 11 + 4)


def test_scores_of_attention_that_is_not_fused_are_kept():
    fused, unfused = (_job(LLAMA, attention=kind) for kind in ("flash", "unfused"))
    peaks = [memory(job).fullest.parts["attention"] for job in (fused, unfused)]
    # Of two sequences and 32 heads in 16 layers, in float32 and in bf16.
    assert peaks[1] - peaks[0] == 16 * 2 * 32 * 1024**2 * (4 + 2)
    assert predict(unfused).mean > predict(fused).mean
    assert any("none of unfused attention" in note for note in unfused.notes)


def test_libraries_of_a_year_are_those_of_jobs_that_name_them():
    cluster = data.load_cluster("dgx-h200", 1)
    older = data.load_kernels(cluster)
    assert older.operators is None
    assert "vector" not in {table.kernel for table in older.efficiency}
    today = data.load_kernels(cluster, data.load_operators("pytorch-2026"))
    assert [source.name for source in today.sources] == ["h200-sxm-2026", "dgx-h100"]
    # An H100 has the same die, which a note says.
    same = data.load_kernels(data.load_cluster("dgx-h100", 1), data.load_operators("pytorch-2026"))
    assert same.find_efficiency("gemm", "bf16") == today.find_efficiency("gemm", "bf16")
    assert "the table of `h200-sxm-2026` is used" in same.notes[0]
    # Of an A100 only kinds that it lacks are those of another device.
    other = data.load_kernels(data.load_cluster("dgx-a100", 1), data.load_operators("pytorch-2026"))
    assert {"vector", "halves"} < {table.kernel for table in other.efficiency}
    assert other.find_efficiency("gemm-output", "") is None
    own = data.load_kernels(data.load_cluster("dgx-a100", 1)).find_efficiency("gemm", "bf16")
    assert other.find_efficiency("gemm", "bf16") == own


def test_a_first_job_of_a_framework_has_its_newest_stack(tmp_path, answered, refused):
    path = tmp_path / "job.toml"
    answered(["init", path, "--framework", "pytorch", "--gpus", "1"])
    job: Any = data.load_job(path)
    assert (job.training.software, job.layout.world_size) == ("pytorch-2026", 1)
    assert fits(job)
    assert "No framework `pytorc`; did you mean `pytorch`" in refused(
        ["init", str(path), "--framework", "pytorc", "--force"]
    )
    answered(["init", path, "--framework", "megatron-bridge", "--force"])
    job = data.load_job(path)
    assert job.training.software == "megatron-bridge-2026"


def test_an_odd_vocabulary_leaves_the_fast_products():
    even = {**GPT2, "vocab_size": 50304}
    odd, aligned = (predict(_job(model)).breakdown["gemm"] for model in (GPT2, even))
    flop = 3 * 2 * 2048 * 1600 * 50257
    assert odd - aligned == pytest.approx(flop / 110e12 - flop / 860e12, rel=0.05)


def test_an_optimizer_op_by_op_moves_each_value_again():
    fused, each = (
        predict(_job(LLAMA, optimizer_kernels=kind)).breakdown["optimizer"]
        for kind in ("fused", "foreach")
    )
    # Norm and clipping besides: 3 values of each parameter, then 7 or 20.
    assert each / fused == pytest.approx(23 / 10, rel=0.02)


@pytest.mark.parametrize(("model", "tensors"), [(LLAMA, 146), (GPT2, 580)])
def test_an_optimizer_in_a_loop_waits_for_eight_launches_of_each_tensor(model, tensors):
    def seconds(kind: str) -> float:
        parts = predict(_job(model, optimizer_kernels=kind, host_backward_s=1e-3)).breakdown
        return parts["optimizer"] + parts["host"]

    device = predict(_job(model, optimizer_kernels="foreach")).breakdown["optimizer"]
    longer = seconds("loop") - seconds("foreach")
    assert longer == pytest.approx(8e-3 * tensors - device, rel=1e-3)


_CONFIG = {"model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192}
_CONFIG |= {"num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8}
_CONFIG |= {"vocab_size": 128256, "tie_word_embeddings": True, "hidden_act": "silu"}
_DEEPSPEED = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
_DEEPSPEED |= {"gradient_accumulation_steps": 4, "train_micro_batch_size_per_gpu": 2}
_MODES = {
    "DDP": {"zero": 0},
    "DDP in each": {"zero": 0, "no_sync": False},
    "ZeRO-1": {"zero": 1},
    "ZeRO-2 in each": {"zero": 2},
    "ZeRO-2": {"zero": 2, "accumulate_gradients": True},
    "FSDP in each": {"zero": 3},
    "FSDP": {"zero": 3, "accumulate_gradients": True},
    "FSDP1": {"zero": 3, "prefetch": 0},
}


def _of(mode: str, gpus: int) -> Any:
    changes = {f"training.{key}": value for key, value in _MODES[mode].items()}
    return _job(LLAMA, {"layout.dp": gpus, "schedule.num_microbatches": 2, **changes})


def test_on_one_gpu_each_equals_plain():
    plain = _of("DDP", 1)
    for mode in _MODES:
        job = _of(mode, 1)
        assert predict(job).mean == predict(plain).mean
        assert memory(job).fullest == memory(plain).fullest


def _sent(job: Any) -> dict[str, tuple[float, float, float]]:
    """The number, bytes and seconds of the collectives of a step, by kind."""
    workload = lower(job_parts(job), [0])
    count, rounds = Counter(), job.schedule.num_microbatches
    blocks = [(workload.forward[0], rounds), (workload.backward[0], rounds), (workload.tail, 1)]
    blocks += [(block, 1) for block in workload.reduce_scatter]
    for block, times in blocks:
        for one, repeats in block:
            for row, by_member in rows_of(one):
                for kernel, number in row:
                    if not by_member and kernel.mean:
                        count[kernel] += times * repeats * number
    sent: dict[str, tuple[float, float, float]] = {}
    for kernel, number in count.items():
        size = float(kernel.size.partition("B")[0])
        if size > 4:  # The norm of the gradients is one number.
            own = (number, number * size, number * kernel.mean)
            before = sent.get(kernel.kind, (0.0, 0.0, 0.0))
            sent[kernel.kind] = tuple(a + b for a, b in zip(before, own, strict=True))  # pyright: ignore
    return sent


@pytest.mark.parametrize("gpus", [2, 8])
def test_collectives_of_ddp_fsdp_and_zero_by_hand(gpus):
    number = count_parameters(_of("DDP", gpus).model)
    words, layers, rounds = 128256 * 2048, 16, 2
    # 16 layers and the embedding, whose matrix is also that of the head, and the last norm.
    units = layers + 2
    whole = 4 * number
    by_hand = {
        "DDP": {"all_reduce": (layers + 1, whole)},  # The norm shares a bucket with a layer.
        "DDP in each": {"all_reduce": (rounds * units, rounds * whole)},
        "ZeRO-1": {"reduce_scatter": (layers + 1, whole), "all_gather": (1, whole)},
        "ZeRO-2": {"reduce_scatter": (layers + 1, whole), "all_gather": (1, whole)},
        "ZeRO-2 in each": {
            "reduce_scatter": (rounds * units, rounds * whole),
            "all_gather": (1, whole),
        },
        "FSDP": {
            "reduce_scatter": (units, whole),
            "all_gather": (rounds * (2 * units - 1), rounds * (2 * whole - 4 * 2048)),
        },
        # Twice for each microbatch, but the head once, which runs back at once.
        "FSDP in each": {
            "reduce_scatter": (rounds * units, rounds * whole),
            "all_gather": (rounds * (2 * units - 1), rounds * (2 * whole - 4 * 2048)),
        },
    }
    for mode, kinds in by_hand.items():
        sent = _sent(_of(mode, gpus))
        assert sent.keys() == kinds.keys(), mode
        for kind, (count, size) in kinds.items():
            assert sent[kind][0] == count, (mode, kind)
            assert sent[kind][1] == pytest.approx(size, rel=1e-6), (mode, kind)
    kept = {mode: memory(_of(mode, gpus)).fullest.parts for mode in by_hand}
    for mode, parts in kept.items():
        shard: dict[str, float] = {}
        shard |= dict.fromkeys(("optimizer", "gradients", "parameters"), 1 / gpus)
        if mode.startswith("DDP"):
            shard = dict.fromkeys(shard, 1.0)
            assert parts["buckets"] == whole
        elif mode.startswith("ZeRO"):
            shard["parameters"] = 1.0
            shard["gradients"] = 1.0 if mode == "ZeRO-1" else 1 / gpus + (mode == "ZeRO-2")
        elif mode == "FSDP":  # The sum of microbatches, until it is reduced.
            shard["gradients"] += 1.0
        assert parts["parameters"] == pytest.approx(whole * shard["parameters"])
        assert parts["optimizer"] == pytest.approx(2 * whole * shard["optimizer"])
        assert parts["gradients"] == pytest.approx(whole * shard["gradients"]), mode
    assert words < number


@pytest.mark.parametrize("mode", ["DDP", "FSDP", "FSDP1"])
def test_buckets_of_a_backward_take_as_long_as_all_of_it(mode):
    job = _of(mode, 2).replace(**{"training.sequence_length": 512})
    job = job.replace(**{"training.accumulate_gradients": True})
    workload = lower(job_parts(job), [0])
    pieces = [one.piece for one in workload.reductions[0] if one.piece]
    assert len(pieces) > 10
    assert sum(map(block_mean, pieces)) == pytest.approx(block_mean(workload.backward[0]))


def test_halves_of_a_backward_wait_for_the_host_as_the_whole_does():
    workload = lower(job_parts(_job(LLAMA, sequence_length=512, microbatch_size=1)), [0])
    halves = workload.backward_input[0], workload.backward_weight[0]
    assert sum(map(block_mean, halves)) == pytest.approx(block_mean(workload.backward[0]))


def test_collectives_of_weights_in_bf16_have_half_the_bytes():
    for mode in _MODES:
        wide, narrow = (_of(mode, 2), _of(mode, 2).replace(**{"training.weights": "bf16"}))
        sizes = [
            {kind: size for kind, (_, size, _) in _sent(job).items()} for job in (wide, narrow)
        ]
        assert sizes[1] == pytest.approx({kind: size / 2 for kind, size in sizes[0].items()}), mode
        kept = [memory(job).fullest.parts for job in (wide, narrow)]
        for part in ("parameters", "gradients", "optimizer", "gathered", "buckets"):
            assert kept[1].get(part, 0) == pytest.approx(kept[0].get(part, 0) / 2), (mode, part)


@pytest.mark.parametrize("mode", ["DDP", "DDP in each", "FSDP", "FSDP in each"])
def test_what_is_hidden_of_collectives_by_hand(mode):
    # Units are longer than what they hide, but for the embedding, and wait for no host.
    free = {"sequence_length": 4096, "host_forward_s": 0.0, "host_backward_s": 0.0}
    job = _of(mode, 8).replace(**{f"training.{key}": value for key, value in free.items()})
    costs, rounds, layers = job_parts(job), 2, 16
    kernels, (first, last) = costs.kernels, ends_of(costs.model)
    share = kernels.overlap.contention
    layer = layers_of(costs.model)[0]

    def seconds(kind: str, part: Any) -> float:
        number = part.parameters(costs.model).total
        return costs.collective(kind, 4 * number, costs.group("dp")).mean

    def beside(collective: float, segments: Any) -> float:
        """What a collective adds to a unit that it runs beside, some of whose compute it takes."""
        compute = (8 / kernels.num_replicas) ** kernels.growth * _mean_of(segments)
        return max(collective - compute, share * collective)

    words, each, norm = (ft.partial(seconds, part=part) for part in (first, layer, last))
    kind = "all_reduce" if mode.startswith("DDP") else "reduce_scatter"
    reduced = words(kind) + share * (norm(kind) + (layers - 1) * each(kind))
    reduced += beside(each(kind), backward_part(costs, first, False))
    if mode == "DDP":  # The norm is in the bucket of a layer.
        whole = costs.collective(kind, 4 * _number([layer, last], costs), costs.group("dp"))
        reduced += share * (whole.mean - each(kind) - norm(kind))
    gathered, kind = 0.0, "all_gather"
    if mode.startswith("FSDP"):  # Forward, and backward, where the head is there already.
        gathered = words(kind) + beside(each(kind), forward_part(costs, first))
        gathered += share * (norm(kind) + (layers - 1) * each(kind))
        gathered += share * (layers * each(kind) + words(kind))
    by_hand = rounds * gathered + (rounds if mode.endswith("each") else 1) * reduced
    # The norm of the gradients is one number.
    by_hand += costs.collective("all_reduce", 4, costs.group("dp")).mean
    found = predict(job).breakdown
    exposed = sum(time for name, time in found.items() if "exposed" in name)
    assert exposed == pytest.approx(by_hand, rel=1e-6)


def _mean_of(segments: Any) -> float:
    return sum(block_mean(((one, 1),)) for one in segments)


def _number(parts: list[Any], costs: Any) -> int:
    return sum(part.parameters(costs.model).total for part in parts)


def test_files_of_accelerate_and_deepspeed_are_of_this_stack(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(_CONFIG))
    (tmp_path / "ds.json").write_text(json.dumps(_DEEPSPEED))
    fsdp = "distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 8\n"
    (tmp_path / "accelerate.yaml").write_text(fsdp)
    jobs: dict[str, Any] = {
        name: import_job([tmp_path / "config.json", tmp_path / name], 8, batch=64).job
        for name in ("ds.json", "accelerate.yaml")
    }
    for job in jobs.values():
        assert job.training.software == "pytorch-2026"
        # Parameters are gathered, or kept, in 16 bits, and so operators have them.
        assert job_parts(job).operands == "bf16"
    deepspeed, sharded = (memory(job).fullest.parts for job in jobs.values())
    number = count_parameters(jobs["ds.json"].model)
    assert deepspeed["parameters"] == 2 * number
    assert deepspeed["optimizer"] == 12 * number / 8  # A copy in float32, and two moments.
    assert sharded["parameters"] == 4 * number / 8


@pytest.mark.parametrize(
    ("bf16", "fp16", "dtype", "weights"),
    [
        # The training arguments, here none, say what is `auto`.
        ({"enabled": "auto"}, {"enabled": "auto"}, "bf16", "copied"),
        ({"enabled": False}, {"enabled": False}, "fp32", None),
        ({"enabled": False}, {"enabled": True}, "fp16", "copied"),
    ],
)
def test_what_no_file_says_of_dtypes_is_told(tmp_path, bf16, fp16, dtype, weights):
    (tmp_path / "config.json").write_text(json.dumps(_CONFIG))
    (tmp_path / "ds.json").write_text(json.dumps(_DEEPSPEED | {"bf16": bf16, "fp16": fp16}))
    imported = import_job([tmp_path / "config.json", tmp_path / "ds.json"], 8, batch=64)
    training = imported.job.training
    assert (training.dtype, training.weights) == (dtype, weights or training.weights)
    is_told = any("No file says a dtype" in note for note in imported.notes)
    assert is_told == (bf16["enabled"] == "auto")


def test_the_largest_batch_leaves_a_part_of_the_largest_tensor():
    job = _job(LLAMA, sequence_length=4096)
    sizes = [job.replace(**{"training.microbatch_size": size}) for size in (7, 8)]
    assert [fits(one) for one in sizes] == [True, False]
    found = memory(sizes[1])
    assert found.reserved["fragmentation"] == pytest.approx(4 * 8 * 4096 * 128256 / 3)
    assert found.fullest.bytes < found.usable_bytes + found.reserved["fragmentation"]


def test_what_the_allocator_reserves_is_within_what_is_said(shared):
    ratios = []
    for name in ("steps.csv", "memory.csv"):
        with (shared / "data/plain_h200" / name).open() as lines:
            rows = [row for row in csv.DictReader(lines) if row.get("ran", "True") == "True"]
        for row in rows:
            found = memory(job_of(row))
            ratios.append(float(row["peak_reserved"]) / found.fullest.bytes)
            assert 0.995 < ratios[-1] < 1 + found.lost_bytes / found.fullest.bytes, row
    assert max(ratios) > 1.8
    assert any("nvidia-smi shows" in note for note in found.summary().notes)
    assert memory(_job(LLAMA, software="megatron-core-2024")).lost_bytes == 0


def test_rows_of_plain_pytorch_are_within_the_limits(shared):
    rows = plain_rows(shared / "data")["rows"]
    off = {
        name: [(row["name"], abs(row["predicted"] / row["measured"] - 1)) for row in of_table]
        for name, of_table in it.groupby(rows, key=lambda row: row["table"])
    }
    assert {name: len(of_table) for name, of_table in off.items()} == {
        "steps": 8,
        "memory": 14,
        "largest_batch": 2,
        "parts": 5,
    }
    limits = {"steps": 0.08, "memory": 0.02, "largest_batch": 0.06, "parts": 0.15}
    for name, of_table in off.items():
        assert max(error for _, error in of_table) < limits[name], of_table
    inside = [row["low"] < row["measured"] < row["high"] for row in rows if row["low"]]
    assert sum(inside) >= 7


@pytest.fixture(scope="module")
def profiled(shared):
    """The job of a profile, and what the profile contains."""
    path = shared / "data/plain_h200/kineto_llama-3.2-1b.json.gz"
    return _job(LLAMA, sequence_length=4096), contents(read_rank_traces(path))


def test_kernels_of_a_profile_have_their_counterparts(profiled):
    classes = {one.name: one for one in kernel_classes(*profiled)}
    for name in ("products", "casts to float32", "casts to 16 bits", "kernels with strides"):
        # The profile has kernels of the norm of the loss, and of the mask, besides.
        assert 0 <= classes[name].measured - classes[name].predicted <= 4, name
    for name, one in classes.items():
        if one.measured_s > 1e-3:
            assert one.predicted_s == pytest.approx(one.measured_s, rel=0.1), name
    assert classes["others"].predicted == 0 < classes["others"].measured
    measured = sum(one.measured_s for one in classes.values())
    assert classes["others"].measured_s < 2e-3 * measured
    assert kernel_classes(_job(LLAMA, software="megatron-core-2024"), profiled[1]) == ()


def test_a_profile_sets_the_rates_of_kernels_for_other_batches(profiled):
    job, found = profiled
    slower = [
        dataclasses.replace(one, total_s=one.total_s * (2 if "nvjet" in one.name else 1))
        for one in found.kernels
    ]
    usual, double = (
        calibrated_to_profile(job, dataclasses.replace(found, kernels=tuple(kernels)), "x")[0]
        for kernels in (found.kernels, slower)
    )
    assert predict(usual).mean == pytest.approx(0.1999, rel=0.02)  # Without the profiler.
    longer = job.replace(**{"training.microbatch_size": 4}).training
    for training in (job.training, longer):
        parts = [
            predict(msgspec.structs.replace(one, training=training)).breakdown
            for one in (usual, double)
        ]
        assert parts[1]["gemm"] == pytest.approx(2 * parts[0]["gemm"], rel=0.01)
        assert parts[1]["attention"] == parts[0]["attention"]


def test_the_time_of_launches_follows_from_a_step_time_without_a_profiler(profiled, tmp_path):
    job, found = profiled
    _, said = calibrated_to_profile(job, found, "x", 0.2)
    assert "the device does not wait for the host" in said
    quick = [dataclasses.replace(one, total_s=one.total_s / 8) for one in found.kernels]
    quick = dataclasses.replace(found, kernels=tuple(quick), idle=())  # The host is behind.
    slow = job.replace(**{"training.host_forward_s": 51e-6, "training.host_backward_s": 43.5e-6})
    calibrated, said = calibrated_to_profile(slow, quick, "x")
    assert "of the stack, since a profiler slows the host" in said
    seconds = predict(calibrated).mean
    again, said = calibrated_to_profile(job, quick, "x", seconds)
    assert again.training
    assert again.training.host_forward_s == pytest.approx(51e-6, rel=5e-3)
    assert "follows from the step time: 51" in said
    path = tmp_path / "mine.toml"
    data.save_job(calibrated, path)
    assert predict(data.load_job(path)).mean == pytest.approx(seconds, rel=1e-6)
    slower, _ = calibrated_to_profile(job, found, "x", 0.3)  # Only then the device waits.
    assert predict(slower).mean == pytest.approx(0.3, rel=2e-3)
    with pytest.raises(ValueError, match="A profile of whole steps calibrates jobs of plain"):
        calibrated_to_profile(_job(LLAMA, software="megatron-core-2024"), found, "x")
    with pytest.raises(ValueError, match="no whole step"):
        calibrated_to_profile(job, dataclasses.replace(found, steps=0), "x")
    for seconds in (0.05, 200.0):  # shorter than the kernels; milliseconds
        with pytest.raises(ValueError, match=r"The step time is .* give the seconds of a step"):
            calibrated_to_profile(job, found, "x", seconds)


def test_calibrate_takes_a_profile_or_step_times(shared, tmp_path, answered, refused):
    path, out = tmp_path / "job.toml", str(tmp_path / "mine.toml")
    data.save_job(_job(LLAMA, sequence_length=4096), path)
    trace = str(shared / "data/plain_h200/kineto_llama-3.2-1b.json.gz")
    found = answered(["calibrate", str(path), "--trace", trace, "--out", out, "--json"])
    assert found["step_time_s"] == pytest.approx(0.1999, rel=0.02)
    assert "since a profiler slows the host" in found["host"]
    assert "Give one of --to and --trace" in refused(
        ["calibrate", str(path), "--out", str(tmp_path / "other.toml")]
    )


def test_rows_without_a_profile_have_the_same_keys(shared, tmp_path):
    for name in ("steps.csv", "memory.csv"):
        lines = (shared / "data/plain_h200" / name).read_text().splitlines()
        (tmp_path / name).write_text("\n".join(lines[:2]) + "\n")
    row, *others = plain_rows(tmp_path)["rows"]
    assert row.keys() == {"table", "name", "measured", "predicted", "low", "high"}
    assert [one["table"] for one in others] == ["memory", "largest_batch"]
    assert all(one["low"] is None for one in others)


def test_a_series_of_which_no_batch_ran_has_a_row_in_the_table(shared, tmp_path):
    folder = shared / "data/plain_h200"
    (tmp_path / "steps.csv").write_text((folder / "steps.csv").read_text().splitlines()[0] + "\n")
    lines = (folder / "memory.csv").read_text().splitlines()
    (tmp_path / "memory.csv").write_text("\n".join(lines[:2]) + "\n")
    assert "| llama-3.2-1b_s4096_fp32 | 0 | 7 | +700.0% |" in plain_table(plain_rows(tmp_path))
