"""Odd rows of measured data give a reason or the right number, and lose no other row."""

import csv
import json
from typing import Any

import numpy as np
import polars as pl
import pytest

from benchmarks import expected_error
from benchmarks.fit_operators import operator_rows, operator_table
from prism_jax.data import load_model
from validation.growth import growth_rows, growth_table
from validation.machines import machine_rows, machine_table
from validation.means import mean_rows, mean_table
from validation.memory import memory_rows, memory_table
from validation.parts import layer_rows, layer_table
from validation.published import published
from validation.published_models import has_experts
from validation.searches import search_rows, search_table
from validation.shipped_jobs import adapter_rows, adapter_table
from validation.systems import systems
from validation.tails import system_rows, system_table


_LLAMA = {"source": "dgxc", "model": "Llama3-8B", "layers": "32", "hidden": "4096", "heads": "32"}
_LLAMA |= {"kv_heads": "8", "ffn": "14336", "vocab": "128256", "seq": "8192", "gpus": "8"}
_LLAMA |= {"gpu_type": "DGX-H100", "tp": "1", "pp": "1", "cp": "1", "ep": "1", "micro_batch": "1"}
_LLAMA |= {"global_batch": "128", "dtype": "bf16", "zero": "1", "step_time_s": "12", "note": ""}
_EXPERTS = {"model": "DeepSeekV3", "layers": "61", "hidden": "7168", "heads": "128"}
_EXPERTS |= {"kv_heads": "128", "ffn": "18432", "vocab": "129280", "seq": "4096", "gpus": "256"}
_EXPERTS |= {"pp": "2", "vpp": "8", "ep": "32", "global_batch": "4096", "gpu_type": "GB300"}
_EXPERTS |= {"source": "Megatron-Bridge", "dtype": "MXFP8", "dispatcher": "hybridep"}
_EXPERTS |= {"pipeline_layout": "Et*4|(t*4|)*14tmL", "experts": "256", "topk": "8"}
_EXPERTS |= {"expert_ffn": "2048", "dense_layers": "3", "shared_ffn": "2048"}
_EXPERTS = _LLAMA | _EXPERTS
_EMPTY = dict.fromkeys(("layers", "hidden", "heads", "kv_heads", "vocab", "experts", "topk"), "")
_EMPTY |= {"expert_ffn": "", "dense_layers": "", "shared_ffn": ""}


def _write(path, rows):
    path.parent.mkdir(exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)))
        writer.writeheader()
        writer.writerows(rows)


def _steps(folder, *rows):
    _write(folder / "steps" / "step_means.csv", rows)
    return list(published(folder))


_ODD = [
    ({"dtype": "NVFP4"}, "fp4"),
    ({"dtype": "amp_fp8", "gpu_type": "A100-80GB"}, "fp8"),
    ({"dispatcher": "pplx"}, "pplx"),
    ({"recompute": "selective", "recompute_modules": "attn"}, "attn"),
    ({"global_batch": "0"}, "`global_batch` is 0"),
    ({"micro_batch": "0"}, "`micro_batch` is 0"),
    ({"tp": "0"}, "`tp` is 0"),
    ({"tp": "half"}, "`tp` is half"),
    ({"hidden": ""}, "`hidden` is not given"),
    ({"vocab": ""}, "`vocab` is not given"),
    ({"step_time_s": "n/a"}, "n/a"),
    ({"step_time_s": "0"}, "no number above 0"),
    ({"step_time_s": "-3"}, "no number above 0"),
    ({"step_time_s": "nan"}, "no number above 0"),
    ({"step_time_s": "inf"}, "no number above 0"),
    ({"gpu_type": "H100 NVL"}, "no device"),
    ({"gpu_type": "GH200 144GB"}, "no device"),
    ({"note": "LoRA dim 0"}, "rank 0"),
    ({"model": "GLM", "hidden": ""}, "`hidden` is not given"),
    ({"model": "Mamba-2 8B"}, "not known"),
    ({"model": "DeepSeek-V4-Lite", "experts": "64"}, "not known"),
    ({"model": "Kimi-Linear"}, "not known"),
    ({"model": "DeepSeekV3 (1 layers)", "layers": ""}, "1 layers"),
    ({"model": "DBRX"}, "not known"),
    ({"note": "FSDP over 0 GPUs"}, "cannot be used"),
    ({"vpp": "1e30"}, "more than its layers"),
]


def test_an_odd_row_has_a_reason_and_loses_no_other(tmp_path):
    rows = [_LLAMA, *(_LLAMA | changes for changes, _ in _ODD), {"source": "dgxc"}, _LLAMA]
    _write(tmp_path / "steps" / "step_means.csv", rows)
    first, *odd, last = found = list(mean_rows(tmp_path))
    assert first == last
    assert 0.8 < first["predicted"] / 12 < 1.2
    for row, (changes, reason) in zip(odd, [*_ODD, ({}, "no step time")], strict=True):
        assert reason in row.get("reason", ""), changes
    assert f"2 of {len(rows)} rows" in mean_table(found)


def _jobs(folder, *rows) -> list[Any]:
    return [one.job for one in _steps(folder, *rows)]


def test_models_do_not_depend_on_how_they_are_spelled(tmp_path):
    names = ["DeepSeekV3", "DeepSeek-V3.1", "deepseek_v3", "DeepSeek R1", "DeepSeek-V3-671B"]
    names.append("DeepSeek3-671B")
    first, *others = _jobs(tmp_path, *({**_EXPERTS, "model": name} for name in names))
    assert all(one == first for one in others)
    names = ["Llama3-8B", "LLAMA3_8B", "Mistral 7B", "Yi", "Qwen3 8B", "Phi-3"]
    names += ["DeepSeek-R1-Distill-Llama-8B"]
    first, *others = _jobs(tmp_path, *({**_LLAMA, "model": name} for name in names))
    assert first.model.activation == "swiglu"
    assert all(one == first for one in others)
    (gpt,) = _jobs(tmp_path, {**_LLAMA, "model": "GPT-8B"})
    assert gpt.model.activation == "gelu"
    old = {**_EXPERTS, "dispatcher": "", "pipeline_layout": "", "pp": "1", "vpp": "1"}
    for pair in (["Kimi_K2", "Kimi K2"], ["GPT OSS 120B", "GPT-OSS-120B"]):
        one, other = _jobs(tmp_path, *(old | _EMPTY | {"model": name} for name in pair))
        assert one == other
        assert one.training.token_dispatcher == "alltoall"
    for name, pair in {
        "deepseek-v2-lite": ["DeepSeek-V2-Lite", "deepseek_v2_lite_16B"],
        "llama-4-scout": ["Llama-4-Scout-17B-16E", "Llama4 Scout"],
        "llama-4-maverick": ["Llama-4-Maverick-17B-128E-Instruct", "llama4-17b-128e"],
    }.items():
        rows = (old | _EMPTY | {"ep": "8", "model": spelled} for spelled in pair)
        one, other = _jobs(tmp_path, *rows)
        assert one == other
        assert one.model.name == name
        assert one.model.layers == load_model(name).layers


def test_columns_say_the_sizes_of_a_known_model(tmp_path):
    known = {**_EXPERTS, "pipeline_layout": "", "vpp": "1"}
    columns = {"layers": "16", "experts": "64", "topk": "4", "expert_ffn": "1024"}
    by_name, by_column = _jobs(tmp_path, known | _EMPTY, known | columns)
    assert by_name.model.num_layers == 61
    first, second = by_column.model.layers
    assert (first.repeat, second.repeat) == (3, 13)
    moe = by_column.model.modules["moe"]
    assert [moe[key] for key in ("num_experts", "top_k", "expert_ffn_size")] == [64, 4, 1024]
    assert by_column.model.modules["mla"] == by_name.model.modules["mla"]


def test_torchtitan_compiles_where_a_row_says_so(tmp_path):
    row = _LLAMA | {"source": "torchtitan", "zero": "FSDP", "micro_batch": "2"}
    compiled = [{"note": note} for note in ("compile, mem 77.0", "2D, torch.compile", "AsyncTP")]
    compiled += [{"dtype": dtype} for dtype in ("float8", "float8-rowwise")]
    not_compiled = [{"note": note} for note in ("", "2D", "no compile", "not compiled", "eager")]
    jobs = _jobs(tmp_path, *(row | changes for changes in (*compiled, *not_compiled)))
    shares = [one.training.eager_share for one in jobs]
    assert shares == [1.0] * len(compiled) + [0.3] * len(not_compiled)


@pytest.mark.parametrize("name", ["GLM-4.5-Air", "DBRX", "OLMoE", "Qwen3-Omni"])
def test_models_with_columns_of_experts_are_in_their_table(tmp_path, name):
    row = {**_EXPERTS, "model": name, "pipeline_layout": "", "layers": "64", "kv_heads": "8"}
    assert has_experts(row)
    one: Any = _steps(tmp_path, row)[0]
    assert one.table == "Megatron-Bridge, GB300, experts"
    assert one.job is not None, one.reason
    assert one.job.model.modules["moe"]["num_experts"] == 256


_FAMILY = {"system": "x", "microbatches": "144", "dp": "4", "gbs": "576", "p50": "20"}


_VTRAIN = {"# GPUs": "8", "global batch": "32", "micro batch": "4", "hidden size": "1024"}
_VTRAIN |= {"attention heads": "16", "# layers": "24", "sequence length": "1024"}
_VTRAIN |= {"tensor parallelism": "2", "data parallelism": "2", "pipeline parallelism": "2"}
_VTRAIN |= {"iteration time (ms)": "220"}


def test_odd_rows_of_vtrain_have_a_reason(tmp_path):
    odd = [{"micro batch": "0"}, {"data parallelism": "0"}, {"iteration time (ms)": ""}]
    odd += [{"hidden size": ""}, {"global batch": "31"}, {"attention heads": "x"}]
    path = tmp_path / "published" / "a100_megatron_deepspeed_single_node.csv"
    _write(path, [_VTRAIN, *(_VTRAIN | one for one in odd)])
    first, *others = mean_rows(tmp_path)
    assert first["measured"] == 0.22
    assert 0.8 < first["predicted"] / 0.22 < 1.25
    assert all(row["reason"] for row in others)


def test_families_of_all_machines_are_read_and_others_have_a_reason(tmp_path):
    names = [f"405B {device} tp4pp8cp2vp8" for device in ("B200", "GB200", "B300", "GB300")]
    others = ["llama2_70b_lora H200 tp4", "mixtral 8x22b H100 tp4", "deepseek GB300", "405B TPU"]
    rows = [{**_FAMILY, "family": name} for name in (*names, *others)]
    _write(tmp_path / "mlperf" / "scaling_families.csv", rows)
    rows = list(mean_rows(tmp_path))
    b200, gb200, b300, gb300 = (row["predicted"] for row in rows[:4])
    assert gb300 <= gb200 < b200
    assert b300 < b200
    assert all("reason" in row for row in rows[4:])
    odd = [{**_FAMILY, "family": names[0], **one} for one in ({"p50": ""}, {"dp": "0"})]
    _write(tmp_path / "mlperf" / "scaling_families.csv", odd)
    assert all("reason" in row for row in mean_rows(tmp_path))


_GROWTH = {"series": "a", "family": "f", "scaling": "weak", "release": "v1"}


def _grown(folder, order, **changes):
    """The growth of two series of one name, whose rows are in some order."""
    steps, series = [], []
    for first, gpus, relative in ((12, 8, 1.0), (12, 16, 1.01), (12, 64, 1.03), (6, 8, 1.0)):
        row = _LLAMA | {"family": "f", "release": "v1", "step_time_s": str(first * relative)}
        row |= {"gpus": str(gpus), "global_batch": str(first // 6 * gpus)}
        steps.append(row)
        series.append(row | _GROWTH | {"relative_time": str(relative)})
    series[-1] |= changes
    _write(folder / "steps" / "step_means.csv", steps)
    _write(folder / "steps" / "growth.csv", [series[i] for i in order])
    return growth_rows(folder)


def test_rows_of_growth_may_be_in_any_order(tmp_path):
    first = _grown(tmp_path, (0, 1, 2, 3))
    assert [row["name"] for row in first] == ["a, 16 GPUs", "a, 64 GPUs"]
    np.testing.assert_allclose([row["measured"] for row in first], [0.01, 0.03])
    assert all(row["predicted"] > 0 for row in first)
    assert _grown(tmp_path, (2, 3, 1, 0)) == first
    assert "| all | 2 |" in growth_table(first)


def test_odd_rows_of_growth_are_left_out_with_a_note(tmp_path, capsys):
    for changes in ({"relative_time": ""}, {"gpus": ""}, {"gpus": "0"}, {"relative_time": "-1"}):
        assert len(_grown(tmp_path, (0, 1, 2, 3), **changes)) == 2
        assert "a row of a is left out" in capsys.readouterr().err
    _write(tmp_path / "steps" / "growth.csv", [{"series": "a", "scaling": "weak"}])
    assert growth_rows(tmp_path) == []


def test_missing_files_are_noted(tmp_path, capsys):
    assert list(published(tmp_path)) == growth_rows(tmp_path) == system_rows(tmp_path) == []
    err = capsys.readouterr().err
    for name in ("step_means.csv", "growth.csv", "scaling_families.csv", "step_times.parquet"):
        assert f"{name} is missing and left out" in err
    assert system_table([])


def test_the_laws_of_errors_are_not_written_from_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(expected_error, "ROOT", tmp_path)  # Nothing is written there.
    (tmp_path / "empty").mkdir()
    for folder, message in (("none", "there is no folder"), ("empty", "no step that can be")):
        monkeypatch.setattr("sys.argv", ["expected_error.py", "--data", str(tmp_path / folder)])
        with pytest.raises(SystemExit):
            expected_error.main()
        assert message in capsys.readouterr().err


_SYSTEM = {"round": "v7", "system": "x", "device": "H100", "run": 0, "bench": "llama31_8b"}


def _logged(folder, steps, **changes):
    rows = [
        {**_SYSTEM, "step": i, "step_time_s": time, "note": ""} | changes
        for i, time in enumerate(steps)
    ]
    _write(folder / "mlperf_v6" / "step_times.csv", rows)
    return systems(folder)


def test_systems_with_few_or_odd_steps(tmp_path, capsys):
    for steps in ([1.0] * 8, [1.0, 1.1, 1.0, 1.2, 1.0], [2.0] * 4 + ["", "n/a", "nan", 0, 2.0]):
        _logged(tmp_path, steps)
        (row,) = system_rows(tmp_path)
        low, high = row["band"]
        assert 1 < low < row["predicted_p95_over_p50"] < high
        assert row["measured"] == steps[-1]
        assert "| dense, H100 and H200 | v7 x llama31_8b |" in system_table([row])
    assert "4 steps without a time are left out" in capsys.readouterr().err
    assert _logged(tmp_path, ["", "n/a"]) == []


@pytest.mark.parametrize(
    ("changes", "group"),
    [
        ({"device": ""}, "dense, others"),
        ({"device": "", "system": "dgxh200_n8"}, "dense, H100 and H200"),
        ({"device": "MI325X"}, "dense, others"),
        ({"device": "TPU v5p"}, "dense, others"),
        ({"device": "A100"}, "dense, others"),
        ({"device": "NVIDIA B300"}, "dense, B200 to GB300"),
        ({"bench": "llama4_scout"}, "experts"),
        ({"bench": "kimi_k2"}, "experts"),
        ({"bench": "qwen3_8b"}, "dense, H100 and H200"),
    ],
)
def test_groups_of_systems(tmp_path, changes, group):
    (one,) = _logged(tmp_path, [1.0, 1.1] * 6, **changes)
    assert one.group == group


@pytest.mark.parametrize("column", ["note", "run", "step", "bench", "device", "round"])
def test_systems_without_a_column(tmp_path, column):
    _logged(tmp_path, [1.0, 1.1] * 6)
    path = tmp_path / "mlperf_v6" / "step_times.csv"
    pl.read_csv(path).drop(column).write_csv(path)
    (one,) = systems(tmp_path)
    assert one.seconds == pytest.approx(1.05, rel=0.06)


def test_a_system_with_experts_is_a_job_by_its_columns(tmp_path):
    config = {"system": "x", "bench": "deepseekv3_671b", "gpus": 256, "tp": 1, "pp": 4, "vp": 4}
    config |= {"cp": 1, "ep": 32, "microbatch": "1 (a note)", "global_batch": 15360}
    config |= {"sequence": 4096, "recompute": "none (a note)", "pipeline_layout": ""}
    said = {"dtype": "mxfp8 (FP8=True FP8_DPA=True)", "dispatcher": "flex/hybridep A=1"}
    said |= {"cuda_graphs": "local full_iteration", "remarks": "fused grouped MLP"}
    plain = {"dtype": "bf16", "dispatcher": "alltoall", "microbatch": "2", "cuda_graphs": "none"}
    found = []
    for one in (said, plain, {"dispatcher": "pplx"}):
        _logged(tmp_path, [40.0] * 9, bench="deepseekv3_671b", device="GB300")
        _write(tmp_path / "mlperf_v6" / "configs.csv", [config | one])
        found += list(published(tmp_path))
    first, second, third = found
    assert [one.seconds for one in found] == [40.0] * 3
    keys = ("dtype", "token_dispatcher", "cuda_graphs", "fused_experts", "fp8_attention")
    values = [[getattr(one.job.training, key) for key in keys] for one in (first, second)]
    assert values[0] == ["mxfp8", "hybridep", "iteration", True, True]
    assert values[1][:3] == ["bf16", "alltoall", "none"]
    assert second.job.training.microbatch_size == 2
    assert third.job is None
    assert third.reason


_LAYER = {"case": "one", "gpu": "H100", "gpus": 8, "nodes": 1, "tp": 1, "pp": 1, "cp": 1, "ep": 8}
_LAYER |= {"etp": 1, "tokens_per_gpu": 4096, "micro_batch": 1, "sequence": 4096, "hidden": 4096}
_LAYER |= {"expert_ffn": 14336, "experts": 8, "topk": 2, "dispatcher": "alltoall", "gated": 1}
_LAYER |= {"dtype": "bf16", "fp8_recipe": "", "balance": "forced", "shared_expert": 0}
_LAYER |= {"forward_s": 0.004, "backward_s": 0.008}


def _layer(folder, **changes):
    """The predicted seconds of a layer, with and without changes."""
    _write(folder / "moe_layers.csv", [_LAYER, _LAYER | changes])
    found = [row["predicted"] for row in layer_rows(folder)]
    return found[:2], found[2:]


@pytest.mark.parametrize(
    ("changes", "low", "high"),
    [
        ({"gpu": "B200"}, 0.3, 0.8),
        ({"gpu": "GB200", "nodes": 2}, 0.3, 0.8),
        ({"gated": 0}, 0.6, 0.85),
        ({"shared_expert": 1}, 1.3, 1.6),
        ({"balance": "dropless"}, 1.1, 1.5),
        ({"tokens_per_gpu": 8192, "sequence": 8192}, 1.9, 2.1),
        ({"cp": 2, "tokens_per_gpu": 2048}, 0.4, 0.6),
        ({"dtype": "fp16"}, 0.99, 1.01),
        ({"dtype": "fp8", "fp8_recipe": "delayed"}, 0.5, 0.8),
        ({"dtype": "mxfp8", "gpu": "B200"}, 0.2, 0.6),
        ({"dtype": "nvfp4", "gpu": "B200"}, 0.1, 0.6),
    ],
)
def test_all_columns_of_a_layer_count(tmp_path, changes, low, high):
    plain, changed = _layer(tmp_path, **changes)
    for one, other in zip(plain, changed, strict=True):
        assert low < other / one < high


def test_scaling_by_blocks_is_slower_than_delayed_scaling(tmp_path):
    _, blocks = _layer(tmp_path, dtype="fp8", fp8_recipe="blockwise, hybrid")
    _, delayed = _layer(tmp_path, dtype="fp8", fp8_recipe="delayed")
    assert blocks[0] > 1.05 * delayed[0]


_UNKNOWN = "topk=64 dispatcher=pplx dispatcher= pp=2 tokens_per_gpu=8192 balance=random dtype=mxfp8"
_UNKNOWN += " dtype=int4 gpu=Gaudi-3 experts= ep=3 gpus=0"


@pytest.mark.parametrize("change", _UNKNOWN.split())
def test_a_layer_that_is_not_known_has_a_reason(tmp_path, change):
    column, _, value = change.partition("=")
    _write(tmp_path / "moe_layers.csv", [_LAYER | {column: value}, _LAYER])
    rows = list(layer_rows(tmp_path))
    assert [bool(row.get("reason")) for row in rows] == [True, True, False, False]
    assert "- 2: " in layer_table(rows)


def test_a_layer_without_a_time_or_a_column(tmp_path):
    less = {key: value for key, value in _LAYER.items() if key != "etp"}
    _write(tmp_path / "moe_layers.csv", [less | {"forward_s": ""}])
    forward, backward = layer_rows(tmp_path)
    assert forward["reason"] == "no time: forward"
    _write(tmp_path / "moe_layers.csv", [_LAYER])
    assert backward == list(layer_rows(tmp_path))[1]


_GEMM = {"device": "h100_sxm", "dtype": "bfloat16", "m": 8192, "n": 8192, "k": 8192}
_GEMM |= {"latency_s": 1.5e-3}
_MOE = {"device": "h100_sxm", "dtype": "bfloat16", "tokens": 4096, "hidden": 4096, "topk": 2}
_MOE |= {"intermediate": 14336, "experts": 8, "ep": 8, "tp": 1, "gated": 1, "latency_s": 1e-3}
_MOE |= {"distribution": "balanced"}
_HEADS = {"device": "h100_sxm", "dtype": "bfloat16", "kernel": "fa3", "batch": 1, "heads": 32}
_HEADS |= {"sequence": 4096, "kv_heads": 8, "head_dim": 128, "window": 0, "causal": 1}
_HEADS |= {"latency_s": 1e-3}
_ALL = {"device": "h100_sxm", "dtype": "half", "op": "all_gather", "bytes": 2**29, "gpus": 8}
_ALL |= {"latency_s": 1.4e-3}


@pytest.mark.parametrize(
    ("name", "row", "changes", "note"),
    [
        ("gemm", _GEMM, {"dtype": "int4"}, "dtype `int4`"),
        ("gemm", _GEMM, {"m": None}, "no known device, size"),
        ("gemm", _GEMM, {"m": 0}, "no known device, size"),
        ("gemm", _GEMM, {"latency_s": float("nan")}, "size or latency"),
        ("gemm", _GEMM, {"device": "v100"}, "no known device"),
        ("moe", _MOE, {"distribution": "zipf"}, "no known device, size"),
        ("moe", _MOE, {"distribution": "power_law_1.5"}, "no table of h100_sxm experts bf16"),
        ("attention", _HEADS, {"head_dim": 99}, "no table of h100_sxm attention_causal bf16"),
        ("collectives", _ALL, {"op": "broadcast"}, "kernel `broadcast`"),
    ],
)
def test_odd_rows_of_kernels_are_counted(tmp_path, capsys, name, row, changes, note):
    pl.DataFrame([row, row | changes]).write_parquet(tmp_path / f"{name}.parquet")
    (found,) = operator_rows(tmp_path)
    assert 0.2 < found["predicted"] / found["measured"] < 5
    err = capsys.readouterr().err
    assert "1 rows" in err
    assert note in err
    assert "| 1 |" in operator_table([found])


def test_a_file_of_kernels_without_a_column_is_noted(tmp_path, capsys):
    pl.DataFrame([_GEMM]).drop("device").write_parquet(tmp_path / "gemm.parquet")
    pl.DataFrame([_MOE]).write_parquet(tmp_path / "moe.parquet")
    assert len(operator_rows(tmp_path)) == 1
    assert "gemm.parquet is left out" in capsys.readouterr().err


_TRIED = {"framework": "Megatron-LM", "model": "Llama-3.1-8B", "device": "A100-40GB-SXM"}
_TRIED |= {"gpus": 4, "tp": 4, "dp": 1, "pp": 1, "ep": 1, "global_batch": 4, "seq": 1024}
_TRIED |= {"recompute": "none", "zero": "0", "ran": 1, "state_bytes_per_gpu": 33.75e9}
_PEAK = {"model": "OPT-350M", "gpu_type": "GH200-96GB", "tp": 4, "pp": 2, "dp": 1, "seq": 2048}
_PEAK |= {"gpus": 8, "micro_batch": 1, "global_batch": "8.0", "layers_per_stage": "12 14"}
_PEAK |= {"max_memory_bytes": 8e9}
_GOLDEN = {"group": "gpt", "case": "a", "device": "h100", "args": "{}"}
_ARGUMENTS = {"num-layers": 4, "hidden-size": 1024, "num-attention-heads": 16, "bf16": True}
_ARGUMENTS |= {"seq-length": 512, "max-position-embeddings": 512, "micro-batch-size": 1}
_ARGUMENTS |= {"vocab-size": 51200, "use-distributed-optimizer": True}


def _memory_of(folder, **files):
    data = folder / "data"
    data.mkdir(exist_ok=True)
    for name, rows in files.items():
        _write(data / name.replace("__", "/").replace("_csv", ".csv"), rows)
    return memory_rows(data)


def test_failures_are_of_memory_where_states_are_too_large_or_a_smaller_microbatch_ran(tmp_path):
    larger = _TRIED | {"micro_batch": 4, "ran": 0, "failure": "segmentation fault"}
    rows = [_TRIED | {"micro_batch": 2}, larger, larger | {"failure": "scheduler"}]
    rows += [larger | {"pp": 4, "tp": 1}, larger | {"pp": 4, "tp": 1, "state_bytes_per_gpu": 5e10}]
    rows += [larger | {"configuration_fault": "a port"}, larger | {"gpus": ""}]
    found = _memory_of(tmp_path, steps__layouts_a100_csv=rows)
    assert [row["ran"] for row in found["rows"]] == [True, False, None, None, False, None]
    assert [row["reason"] for row in found["refused"]] == ["`gpus` is not given"]
    assert "false fits: 0 of 2 runs that ran out of memory (0.0%)" in memory_table(found)


def test_tried_layouts_are_rows_of_their_search_or_counted(tmp_path):
    timed = _TRIED | {"search": "a", "micro_batch": 2, "gpus": "4.0", "sequences_per_s": "2.0"}
    failed = timed | {"ran": "0.0", "failure": "segmentation fault", "sequences_per_s": ""}
    odd = [{"failure": "scheduler"}, {"configuration_fault": "a port"}, {"ran": ""}, {"gpus": ""}]
    rows = [timed, failed, *(failed | changes for changes in odd), timed | {"global_batch": ""}]
    _write(tmp_path / "steps" / "layouts_a100.csv", rows)
    result = search_rows(tmp_path)
    assert [(row["measured"], row["ran"]) for row in result["rows"]] == [(0.5, True), (None, False)]
    assert all(row["table"] == "a" and row["fits"] for row in result["rows"])
    assert sum(result["left_out"].values()) == 5
    assert result["left_out"]["`global_batch` is not given"] == 1
    assert "| a | 2 | 1 |" in search_table(result)


def test_odd_rows_of_memory_have_a_reason(tmp_path):
    odd = [{"layers_per_stage": text} for text in ("12", "x")] + [
        {"micro_batch": ""},
        {"model": "T5"},
    ]
    note = {"note": "compile, mem 77.0; local batch 2", "source": "torchtitan", "zero": "FSDP"}
    found = _memory_of(
        tmp_path,
        steps__more_memory_csv=[_PEAK, *(_PEAK | one for one in odd)],
        megatron_golden__memory_csv=[_GOLDEN, {"case": "b"}],
        steps__step_means_csv=[_LLAMA, _LLAMA | note, _LLAMA | {"tp": "0"}],
    )
    assert len(found["rows"]) == 3
    assert len(found["refused"]) == 7
    peaks = [row["measured"] for row in found["rows"]]
    assert peaks == [None, 77 * 2**30, 8e9]
    assert all(row["ran"] is True and row["predicted"] > 0 for row in found["rows"])
    assert all(row["reason"] for row in found["refused"])


def test_gpus_that_no_recipe_states_are_those_of_the_states_after_a_step(tmp_path):
    args = json.dumps(_ARGUMENTS)
    row = _GOLDEN | {"args": args, "mem_max_allocated_bytes": 3e9}
    parameters = 51200 * 1024 + 512 * 1024 + 4 * (12 * 1024**2 + 13 * 1024) + 2 * 1024
    after = [(6 + 12 / gpus) * parameters + 92 * 2**20 for gpus in (8, 32)]
    allocated = [{"mem_allocated_bytes": size} for size in (*after, 5.9 * parameters)]
    stated = [row | {"gpus": gpus} for gpus in (8, 32)]
    rows = [*stated, *(row | one for one in allocated)]
    found = _memory_of(tmp_path, megatron_golden__memory_csv=rows)
    peaks = [row["predicted"] for row in found["rows"]]
    assert peaks[0] - peaks[1] == 12 * parameters / 8 * 3 / 4
    assert peaks[2:] == peaks[:2]
    (refused,) = found["refused"]
    assert "recorded with other arguments" in refused["reason"]


def test_the_first_line_of_a_case_says_what_ran(tmp_path):
    cases = tmp_path / "cases"
    cases.mkdir()
    text = 'kind = "job"\ncluster = "dgx-h100"\nnum_nodes = 1\nmodel = "llama-3.1-8b"\n'
    text += '[layout]\ndp = 8\n[schedule]\nkind = "1f1b"\nnum_microbatches = 1\n'
    text += "[training]\nmicrobatch_size = 1\nsequence_length = 8192\n"
    firsts = ["# ran: 4.3 s, 50.5 GB reserved of 85.9", "# ran on 8 B300 (288 GB): 47 s"]
    firsts += ["# ran out of memory; loss in eight chunks", "# a job", "# ran: 2 GiB"]
    for i, first in enumerate(firsts):
        (cases / f"c{i}.toml").write_text(f"{first}\n{text if i < 4 else ''}")
    found = _memory_of(tmp_path)
    said = [(row["measured"], row["ran"]) for row in found["rows"]]
    assert said == [(50.5e9, True), (None, True), (None, False)]
    assert [row["name"] for row in found["refused"]] == ["c4"]
    *_, whole, in_chunks = (row["predicted"] for row in found["rows"])
    assert whole > in_chunks


def test_steps_with_adapters_and_of_other_machines_stand_beside_their_predictions(tmp_path):
    lora = {**_LLAMA, "model": "Llama3-8B (LoRA)", "source": "NeMo-Automodel", "zero": "FSDP"}
    _write(tmp_path / "steps" / "step_means.csv", [_LLAMA, lora])
    other = {**_LLAMA, "source": "tpu-recipes", "gpu_type": "TPU-v6e", "zero": "FSDP"}
    unknown = {**other, "gpu_type": "TPU-v9"}
    _write(tmp_path / "steps" / "more_machines.csv", [other, unknown])
    adapted = [row for row in adapter_rows(tmp_path) if "measured" in row]
    (of_means,) = [row for row in mean_rows(tmp_path) if "LoRA" in row["name"]]
    assert [row["predicted"] for row in adapted] == [of_means["predicted"]]
    assert "(LoRA)" in adapter_table([{"assumed": "x", "predicted": 1.0, "error": 0.0}, *adapted])
    machines = machine_rows(tmp_path)
    (predicted,) = machines["rows"]
    assert predicted["low"] < predicted["predicted"] < predicted["high"]
    assert predicted["measured"] == 12
    assert "1 rows cannot be written as jobs:\n- 1: no device TPU-v9" in machine_table(machines)
