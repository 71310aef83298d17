"""Four laws of every module, in all models that are shipped or published: the name of a kernel says
its operations, the two halves of a backward are the whole, parameters are as published, and what
keeps less needs no more memory.
"""

import itertools as it
import math
import pathlib
import tomllib
from typing import Any

import msgspec
import pytest

import prism_jax as prism
from prism_jax.data import Model, list_names
from prism_jax.data._model import Layer
from prism_jax.lowering import job_parts
from prism_jax.workload import Kernel, block_mean, count_parameters, memory_of_stages
from prism_jax.workload._architecture import ends_of, layers_of
from prism_jax.workload.modules import modules

from .helpers import kernels_of, lower_job, small_model


_DENSE, _GPT3, _TABLES = "megatron-22b-a100-8", "gpt3-175b-h100-4096", "dlrm-dcnv2-gb300-64"
_ROWS = tomllib.loads((pathlib.Path(__file__).parent / "data/models.toml").read_text())


def _made(row: dict[str, Any]) -> Model:
    layers = [
        {"modules": names, "repeat": number, "norms": row.get("norms")}
        for times, *block in row["layers"]
        for number, *names in block * times
    ]
    return msgspec.convert(row["model"] | {"layers": layers}, Model)


# As their makers' classes have them; how many parameters of these a token uses, where that is said.
MODELS = {name: _made(row) for name, row in _ROWS.items()}
ACTIVE = {name: row["active"] for name, row in _ROWS.items() if "active" in row}
# Layers of three kinds, of which one has experts.
HYBRID = small_model(
    layers=(Layer(("attention", "mlp"), 2), Layer(("mla", "moe"), 3), Layer(("mamba", "mlp"), 3)),
    modules={
        "mla": {"q_lora_rank": 256, "kv_lora_rank": 128},
        "moe": {"num_experts": 8, "top_k": 2, "expert_ffn_size": 512, "num_shared_experts": 1},
        "mamba": {"mamba_num_heads": 32},
    },
)
LAYOUTS = (
    "layout.tp=2",
    "layout.tp=1 training.sequence_parallel=false",
    "layout.tp=1",
    "layout.tp=2 layout.dp=4 layout.ep=4 layout.etp=1",
    "layout.tp=2 layout.dp=4 layout.ep=2 layout.etp=2",
    "layout.tp=2 layout.pp=4",
)
# A shipped job with changes, and a model in place of its own.
_JOBS: dict[str, tuple[str, Model | None]] = {name: (name, None) for name in list_names("job")}
_JOBS |= {name: (f"{_DENSE} layout.tp=1", model) for name, model in MODELS.items()}
_JOBS |= {f"hybrid {layout}": (f"{_DENSE} {layout}", HYBRID) for layout in LAYOUTS}
# Rows of DLRM's tables meet by their dot products, as in its first version.
_DLRM: Any = prism.load_model("dlrm-dcnv2")
_DOT = {**_DLRM.modules, "cross": {"kind": "dot-interaction", "num_vectors": 27}}
_JOBS["dot products"] = (_TABLES, msgspec.structs.replace(_DLRM, modules=_DOT))
_OVERLAPPED = [
    f"{_GPT3} layout.tp={tp} training.dtype={dtype} training.sequence_parallel={split}"
    for tp, dtype, split in it.product((1, 4), ("bf16", "fp8"), ("true", "false"))
]


def job_of(name: str, *changes: str) -> Any:
    """A job of the table, without recomputation unless it is changed."""
    words, model = _JOBS.get(name, (name, None))
    base, *more = words.split()
    job: Any = prism.load_job(base, [*more, "training.recompute=none", *changes])
    if model is None:
        return job
    training = msgspec.structs.replace(job.training, attention="flash")
    return msgspec.structs.replace(job, model=model, training=training)


every = pytest.mark.parametrize("name", _JOBS)


def test_all_modules_are_among_these():
    models = [job_of(name).model for name in _JOBS]
    parts = [part for model in models for part in (*layers_of(model), *ends_of(model))]
    own = {name for name, cls in modules().items() if cls.__module__.startswith("prism_jax.")}
    assert {type(module).kind for part in parts for module in part.modules} == own


def _apart(*phases):
    """The blocks of stages that are not those of another stage."""
    return {tuple(map(id, blocks)): blocks for blocks in zip(*phases, strict=True)}.values()


def _flop_of_name(kernel: Kernel) -> float:
    """Of products, and of attention: a causal one has half of the pairs of queries and keys, or
    those of a window, or of the chosen keys of an indexer, which makes scores alone.
    """
    if kernel.kind == "gemm":
        shapes = (product.split()[1] for product in kernel.size.split(" and "))
        return sum(2.0 * math.prod(map(int, shape.split("x"))) for shape in shapes)
    _, shape, *mask, phase = kernel.size.split()
    batch, heads, queries, keys, head = shape.split("x")
    key, _, value = head.partition("+")
    count, length = int(batch) * int(heads) * int(queries), int(keys)
    name = mask[0].rstrip("0123456789") if mask else ""
    most = int(mask[0].removeprefix(name)) if name in ("window", "index") else length
    if name == "index" and phase == "forward":
        most = length
    seen = length if name == "all" else most - most**2 / 2 / length if most < length else length / 2
    products = (1, 1) if phase == "forward" else (3, 2)
    if name == "index":
        products = (1, 0) if phase == "forward" else (2, 0)
    return 2.0 * count * seen * (products[0] * int(key) + products[1] * int(value or key))


@every
def test_names_say_operations(name):
    work = lower_job(job_of(name))
    for block in _apart(work.forward, work.backward, work.backward_input, work.backward_weight):
        for kernel in it.chain(*map(kernels_of, block)):
            if kernel.kind in ("gemm", "attention"):
                assert kernel.flop == pytest.approx(_flop_of_name(kernel), rel=1e-9), kernel
            elif kernel.link is not None:
                assert kernel.flop == 0


@pytest.mark.parametrize("name", [*_JOBS, *_OVERLAPPED])
def test_halves_of_a_backward_are_the_whole(name):
    """The same kernels, but that inputs are gathered once more; what ran beside the gradient of a
    weight has nothing to hide behind.
    """
    for overlap in (True, False):
        job = job_of(name, *([] if overlap else ["training.overlap_tp_backward=false"]))
        work, longer = lower_job(job), 0.0
        for whole, *halves in _apart(work.backward, work.backward_input, work.backward_weight):
            kernels, parts = kernels_of(whole), kernels_of(halves[0]) + kernels_of(halves[1])
            assert {k.kind for k in (kernels - parts) + (parts - kernels)} <= {"all_gather"}
            assert kernels == parts or overlap or name not in _OVERLAPPED
            mean, apart = block_mean(whole), sum(map(block_mean, halves))
            assert apart >= mean * (1 - 1e-12)
            longer += apart - mean
            if job.layout.tp == 1 or not overlap:
                # The steps of a ring of context wait for each other once more.
                assert apart == pytest.approx(mean, rel=1e-12 if job.layout.cp == 1 else 1e-4)
        if job.layout.tp > 1 and overlap:
            assert longer > 0


# Billions of parameters as published, and how near these are.
_BILLIONS = {
    "gpt3-175b": (174.6, 0.005),
    "llama-3.1-8b": (8.030261248, 1e-9),
    "llama-3.1-70b": (70.553706496, 1e-9),
    "llama-3.1-405b": (405.853388800, 1e-9),
    "mixtral-8x7b": (46.702792704, 1e-9),
    "mixtral-8x22b": (140.6, 1e-3),
    "deepseek-v3": (671.0, 1e-3),
    "deepseek-v2": (236.0, 2e-3),
    "deepseek-v2-lite": (15.7, 2e-3),
    "qwen3-235b-a22b": (235.0, 1e-3),
    "qwen3-30b-a3b": (30.5, 2e-3),
    # The config.json that is published makes 1.3 % less than the 1.04 T of the paper's table.
    "kimi-k2": (1026.408209408, 1e-9),
    # 675,129,632 with the fixed positions of 256 tokens.
    "dit-xl-2": (0.675129632 - 256 * 1152e-9, 1e-9),
    "latte-xl-2": (0.67368, 1e-5),
    "wan2.1-t2v-14b": (14.288491584, 1e-9),
    "flux1-schnell": (11.891178560, 0),
    "gpt-oss-120b": (116.83, 1e-3),
    "nemotron-3-nano": (31.6, 1e-3),
    # 109 and 402 billion with the vision encoder of 0.9.
    "llama-4-scout": (108.1, 5e-3),
    "llama-4-maverick": (401.1, 5e-3),
    "nemotron-h-8b": (8.1, 1e-3),
    "megatron-22b": (22.0, 0.02),
    "megatron-530b": (529.6, 0.005),
    "megatron-1t": (1008.0, 0.005),
}


@pytest.mark.parametrize("name", [*_BILLIONS, *MODELS])
def test_parameters_are_as_published(name):
    if name in MODELS:
        assert count_parameters(MODELS[name]) == _ROWS[name]["parameters"]
    else:
        billions, tolerance = _BILLIONS[name]
        number = count_parameters(prism.load_model(name))
        assert number == pytest.approx(billions * 1e9, rel=tolerance or 1e-15)


@every
def test_what_keeps_less_needs_no_more_memory(name):
    """With recomputation by op, and in full; and with fewer microbatches, on each rank."""
    needed, kept = [], []
    for recompute in ("none", "by-op", "full"):
        job = job_of(name, f"training.recompute={recompute}")
        ranks = tuple(range(job.layout.pp)) * job.schedule.virtual_stages
        stages = memory_of_stages(job_parts(job), ranks)
        kept.append(sum(sum(stage.kept.values()) for stage in stages))
        needed.append(prism.memory(job).fullest.bytes)
    assert needed[0] >= needed[1] >= needed[2]
    assert kept[0] >= kept[1] >= kept[2] < kept[0]
    more = job.replace(**{"schedule.num_microbatches": 2 * job.schedule.num_microbatches})
    for few, many in zip(prism.memory(job).ranks, prism.memory(more).ranks, strict=True):
        assert few.bytes <= many.bytes
