"""Plain PyTorch on one GPU: steps, memory, the largest batch and the parts of a step, as
`plain_h200/` has them (`steps.csv`, `memory.csv` and, if it is there, a profile). Of a row only its
configuration is read besides what was measured.
"""

import csv
import functools as ft
import gzip
import json
import pathlib
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prism_jax.data import Job, make_job
from prism_jax.prediction import expected_error, fits, memory, predict
from validation.tables import table


# Public sizes: width, width of the MLP, layers, heads, heads of keys, vocabulary, tied.
_LLAMA: dict[str, Any] = {"norm": "rmsnorm", "activation": "swiglu", "position": "rotary"}
_LLAMA["bias"] = False
_SIZES = {
    "llama-3.2-1b": (2048, 8192, 16, 32, 8, 128256, True),
    "llama-3.2-3b": (3072, 8192, 28, 24, 8, 128256, True),
    "llama-3-8b": (4096, 14336, 32, 32, 8, 128256, False),
    "mistral-7b": (4096, 14336, 32, 32, 8, 32000, False),
    "tinyllama-1.1b": (2048, 5632, 22, 32, 4, 32000, False),
    "qwen2.5-0.5b": (896, 4864, 24, 14, 2, 151936, True),
    "qwen2.5-1.5b": (1536, 8960, 28, 12, 2, 151936, True),
    "qwen2.5-3b": (2048, 11008, 36, 16, 2, 151936, True),
    "qwen2.5-7b": (3584, 18944, 28, 28, 4, 152064, False),
}
_GPT2 = {
    "gpt2": (768, 12, 12),
    "gpt2-medium": (1024, 24, 16),
    "gpt2-large": (1280, 36, 20),
    "gpt2-xl": (1600, 48, 25),
}
# Kernels by names, the first that fits; all others are elementwise.
_KERNELS = {
    "optimizer": "multi_tensor|lpnorm|Adam",
    "loss": "softmax|SoftMax|nll_loss",
    "attention": "cudnn|flash|fmha|attention",
    "products": "nvjet|gemm|cutlass|cublas",
}
_PARTS = {"gemm": "products", "norm": "elementwise", "embedding": "elementwise"}


def plain_rows(data: pathlib.Path) -> dict[str, list[dict[str, Any]]]:
    """The rows of all tables, of a folder or of its `plain_h200/`."""
    folder = data if (data / "steps.csv").is_file() else data / "plain_h200"
    steps, sizes = _read(folder / "steps.csv"), []
    if (folder / "memory.csv").is_file():
        sizes = _read(folder / "memory.csv")
    peaks = (peak for row in (*steps, *sizes) for peak in _peak(row))
    rows = [*map(_step, steps), *peaks]
    return {"rows": [*rows, *_largest(sizes), *_parts(folder, steps)]}


def plain_table(result: dict[str, list[dict[str, Any]]]) -> str:
    """The rows as tables, and how far each table is off."""
    tables = defaultdict(list)
    for row in result["rows"]:
        tables[row["table"]].append(row)
    blocks = []
    for name, rows in tables.items():
        lines = [[r["name"], r["measured"], r["predicted"], f"{_off(r):+.1%}"] for r in rows]
        errors = [abs(_off(row)) for row in rows]
        middle, most = statistics.mean(errors), max(errors)
        blocks.append(table([f"plain, {name}", "measured", "predicted", "off"], lines))
        blocks.append(f"{name}: {middle:.1%} off on average, {most:.1%} at most")
    return "\n\n".join(blocks)


def job_of(row: Mapping[str, str], batch: int | None = None) -> Job:
    """The job of a row."""
    model, compiled = row["model"], row.get("compiled") == "True"
    training = {
        "microbatch_size": int(row["batch"]) if batch is None else batch,
        "sequence_length": int(row["sequence"]),
        "software": "pytorch-compile-2026" if compiled else "pytorch-2026",
        "weights": row["weights"],
        "recompute": "full" if row["recompute"] == "True" else "none",
    }
    if model.startswith("gpt2"):
        training["separate_products"] = False  # c_attn
    raw = {
        "model": _model(model),
        "cluster": "dgx-h200",
        "num_nodes": 1,
        "layout": {"dp": 1},
        "schedule": {"kind": "1f1b", "num_microbatches": int(row.get("accumulate") or 1)},
        "training": training,
    }
    return make_job(raw, pathlib.Path(f"{model}.toml"))


def _model(name: str) -> dict[str, Any]:
    """The table of a model, empty for one that is not known."""
    cut = re.fullmatch(r"(.*?)(?:-(\d+)-layers)?", name)
    assert cut is not None
    whole, depth = cut.groups()
    if whole in _GPT2:
        width, layers, heads = _GPT2[whole]
        sizes: dict[str, Any] = {"ffn_size": 4 * width, "vocab_size": 50257, "max_positions": 1024}
        sizes |= {"hidden_size": width, "num_layers": layers, "num_heads": heads}
        sizes["activation"] = "gelu_new"
    elif whole in _SIZES:
        keys = "hidden_size ffn_size num_layers num_heads num_kv_heads vocab_size tied_embeddings"
        sizes = dict(zip(keys.split(), _SIZES[whole], strict=True)) | _LLAMA
        sizes["head_size"] = sizes["hidden_size"] // sizes["num_heads"]
        if whole.startswith("qwen2"):
            sizes["modules"] = {"attention": {"qkv_bias": True}}
    else:
        return {}
    sizes |= {"num_layers": int(depth)} if depth else {}
    if "modules" in sizes:
        sizes["layers"] = [{"modules": ["attention", "mlp"], "repeat": sizes["num_layers"]}]
    return {"name": name, **sizes}


def _read(path: pathlib.Path) -> list[dict[str, str]]:
    """The rows of models whose sizes are known here, with a note on the others."""
    with path.open() as lines:
        rows = list(csv.DictReader(lines))
    unknown = {name for name in {row["model"] for row in rows} if not _model(name)}
    for name in sorted(unknown):
        print(
            f"{path}: the sizes of {name} are not known, so its rows are left out", file=sys.stderr
        )
    return [row for row in rows if row["model"] not in unknown]


def _row(table: str, name: str, measured: float, predicted: float, *ends: float) -> dict[str, Any]:
    low, high = ends or (None, None)
    values = {"measured": measured, "predicted": predicted, "low": low, "high": high}
    return {"table": table, "name": name, **values}


def _off(row: Mapping[str, Any]) -> float:
    """How far a prediction is off; of no batch that ran, the whole of one that was predicted."""
    return (row["predicted"] - row["measured"]) / (row["measured"] or 1)


def _step(row: Mapping[str, str]) -> dict[str, Any]:
    job = job_of(row)
    seconds = predict(job).mean
    low, high = expected_error(job).interval()
    return _row("steps", row["name"], float(row["p50_s"]), seconds, low * seconds, high * seconds)


def _named(row: Mapping[str, str], *, batch: bool = True) -> str:
    words = [row["model"], *([f"b{row['batch']}"] if batch else []), f"s{row['sequence']}"]
    return "_".join([*words, row["weights"], *["recompute"] * (row["recompute"] == "True")])


def _peak(row: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    if row.get("ran", "True") == "True":
        predicted = memory(job_of(row)).fullest.bytes
        name = row.get("name") or _named(row)
        yield _row("memory", name, float(row["peak_allocated"]), predicted)


def _largest(rows: Iterable[Mapping[str, str]]) -> Iterator[dict[str, Any]]:
    """The largest batch of each series that runs, and that fits: by doubling, then halving."""
    series = defaultdict(list)
    for row in rows:
        series[_named(row, batch=False)].append(row)
    for name, tried in series.items():
        ran = [int(row["batch"]) for row in tried if row["ran"] == "True"]
        low, high = 0, 1
        while fits(job_of(tried[0], high)):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(job_of(tried[0], middle)) else (low, middle)
        yield _row("largest_batch", name, max(ran, default=0), low)


def _parts(folder: pathlib.Path, steps: Iterable[Mapping[str, str]]) -> Iterator[dict[str, Any]]:
    """The parts of a step of each profile, which is of the first row of its model."""
    for path in sorted(folder.glob("kineto_*.json.gz")):
        model = path.name.removeprefix("kineto_").removesuffix(".json.gz")
        row = next((row for row in steps if row["model"] == model), None)
        if row is None:
            continue
        predicted: dict[str, float] = defaultdict(float)
        for name, seconds in predict(job_of(row)).breakdown.items():
            predicted[_PARTS.get(name, name)] += seconds
        for name, seconds in _measured_parts(path).items():
            yield _row("parts", f"{row['name']} {name}", seconds, predicted[name])


@ft.cache
def _measured_parts(path: pathlib.Path) -> dict[str, float]:
    """The seconds of kernels in a step, by part."""
    with gzip.open(path) as lines:
        events = json.load(lines)["traceEvents"]
    steps = sum(
        event.get("cat") == "user_annotation" and event["name"].startswith("Optimizer.step")
        for event in events
    )
    parts: dict[str, float] = defaultdict(float)
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            fit = (part for part, names in _KERNELS.items() if re.search(names, event["name"]))
            parts[next(fit, "elementwise")] += event["dur"] / 1e6 / steps
    return parts
