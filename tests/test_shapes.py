import itertools as it
import pathlib
import tomllib
from collections.abc import Mapping
from typing import Any

import numpy as np
import polars as pl
import pytest
from msgspec.structs import replace

from benchmarks.fit_operators import DEVICES, operator_rows, operator_table
from prism_jax import data
from prism_jax.cluster import (
    MeasuredLatencies,
    attention_sizes,
    cross_validate,
    fit_shapes,
    gemm_latency,
    shape_latencies,
    shape_latency,
)
from prism_jax.cluster._fit_shapes import find_kind
from prism_jax.data._load_kernels import load_shapes
from prism_jax.data._shapes import read_shapes
from prism_jax.lowering import job_parts
from prism_jax.trace import read_kernels
from prism_jax.workload.modules._convolution import convolve
from validation.training_operators import training_operator_rows


_ROOT = pathlib.Path(__file__).resolve().parents[1]
_SIZES = (256, 1000, 1024, 4096, 9999, 16384)


def _law(m, n, k):
    """Seconds of a product whose efficiency falls at small sizes, in the form that is fitted."""
    return 2e-15 * m * n * k * (1024 / m) ** 0.1 * (4096 / k) ** 0.05


@pytest.fixture(scope="module")
def measured():
    m, n, k = (np.array(x, float) for x in zip(*it.product(_SIZES, repeat=3), strict=True))
    return MeasuredLatencies("gemm", "bf16", 0.0, {"m": m, "n": n, "k": k}, _law(m, n, k))


@pytest.fixture(scope="module")
def table(measured):
    return fit_shapes(measured)


def test_a_known_law_is_found(measured, table):
    errors = np.log(shape_latencies(table, measured.columns) / measured.seconds)
    assert np.abs(errors).max() < 2e-3
    assert abs(errors.mean()) < 1e-4
    # A shape that was in no row, and those that were left out.
    assert shape_latency(table, {"m": 3000, "n": 777, "k": 2000}) == pytest.approx(
        _law(3000, 777, 2000), rel=2e-3
    )
    assert np.abs(cross_validate(measured)).max() < 0.02


def test_outliers_hardly_count(measured):
    slow = measured.seconds * np.where(np.arange(len(measured.seconds)) % 29, 1.0, 5.0)
    columns, fitted = (
        measured.columns,
        fit_shapes(MeasuredLatencies("gemm", "bf16", 0.0, measured.columns, slow)),
    )
    errors = np.log(shape_latencies(fitted, columns) / measured.seconds)
    assert errors.std() < 0.02


def test_rows_of_a_shape_are_left_out_together(measured):
    """Otherwise a second row of a shape would say how long the first took."""
    twice = {name: np.tile(x, 2) for name, x in measured.columns.items()}
    noise = np.exp(0.3 * np.random.default_rng(1).standard_normal(len(measured.seconds)))
    seconds = np.tile(measured.seconds * noise, 2)
    errors = cross_validate(MeasuredLatencies("gemm", "bf16", 0.0, twice, seconds))
    assert errors.std() > 0.3


def test_sizes_beyond_the_range_count_as_its_ends(table):
    inside = {"m": 16384.0, "n": 1024.0, "k": 4096.0}
    assert data.outside(table, inside) == ()
    large = inside | {"m": 4 * 16384.0}
    assert data.outside(table, large) == ("m",)
    assert shape_latency(table, large) == pytest.approx(4 * shape_latency(table, inside))
    small = inside | {"k": 16.0}
    assert data.outside(table, small) == ("k",)
    assert shape_latency(table, small) == pytest.approx(shape_latency(table, inside | {"k": 256.0}))


def test_one_shape_makes_a_table_of_its_rate():
    one = MeasuredLatencies(
        "all_gather", "", 0.0, {"bytes": np.ones(1) * 1e6, "gpus": np.ones(1) * 8}, np.array([1e-4])
    )
    assert shape_latency(fit_shapes(one), {"bytes": 3e6, "gpus": 8}) == pytest.approx(3e-4)
    assert np.isnan(cross_validate(one)).all()


def test_files_hold_the_tables(table, tmp_path):
    source = data.Source("who", "when", "software", "licence", {"rows": 1})
    data.save_shapes(tmp_path, [table], source)
    (read,) = read_shapes(tmp_path / "shapes.csv")["gemm bf16"]
    assert read.ranges == table.ranges
    sizes = {"m": 3000, "n": 777, "k": 20000}
    assert shape_latency(read, sizes) == pytest.approx(shape_latency(table, sizes), rel=5e-3)
    assert tomllib.loads((tmp_path / "source.toml").read_text())["who"] == "who"


def _shipped():
    for device, _ in DEVICES.values():
        for tables in load_shapes(device).values():
            yield from tables


def test_arrays_and_numbers_have_one_law():
    key = np.random.default_rng(0)
    for table in _shipped():
        low, high = (np.array(ends) for ends in zip(*table.ranges.values(), strict=True))
        # Also beyond the ends.
        drawn = np.exp(key.uniform(np.log(low / 2), np.log(high * 2), (5, len(low))))
        columns = dict(zip(table.ranges, drawn.T, strict=True))
        each = [shape_latency(table, dict(zip(table.ranges, row, strict=True))) for row in drawn]
        np.testing.assert_allclose(shape_latencies(table, columns), each, rtol=1e-9)


def test_every_shipped_table_has_a_source_and_known_columns():
    for device, _ in DEVICES.values():
        path = _ROOT / "kernels" / "shapes" / device / "source.toml"
        source = data.read_struct(path, "source", data.Source)
        assert "benchmarks/fit_operators.py" in source.constants[0].value
    for table in _shipped():
        assert {*table.ranges} == {*find_kind(table.kernel).columns}
        assert table.terms


def test_shipped_tables_are_small():
    size = sum(path.stat().st_size for path in (_ROOT / "kernels" / "shapes").rglob("*.*"))
    assert size < 210_000  # Of eight devices, two with calls of training.


def test_latencies_of_an_h100():
    kernels = data.load_kernels(data.load_cluster("dgx-h100", 1))
    # The measured figures are in `../shared/data/README.md`.
    assert gemm_latency(kernels, "bf16", 8192, 8192, 8192) == pytest.approx(1.54e-3, rel=0.06)
    assert gemm_latency(kernels, "fp16", 8192, 8192, 8192) == gemm_latency(
        kernels, "bf16", 8192, 8192, 8192
    )
    assert gemm_latency(kernels, "mxfp8", 999, 999, 999) == gemm_latency(
        kernels, "fp8", 999, 999, 999
    )
    shape = {"tokens": 4096, "hidden": 7168, "topk": 8, "experts": 256, "sms": 20}
    between = {"nodes": 2, "tokens": 4096, "sms": 20}
    for way, seconds, seconds_between in (
        ("dispatch", 0.49e-3, 0.84e-3),
        ("combine", 0.98e-3, 2.10e-3),
    ):
        assert _seconds(kernels, f"deepep_{way}", "", shape) == pytest.approx(seconds, rel=0.06)
        found = _seconds(kernels, f"deepep_{way}_nodes", "", between)
        assert found == pytest.approx(seconds_between, rel=0.1)
    size = 512 * 2**20
    ring = _seconds(kernels, "all_gather", "", {"bytes": size, "gpus": 8})
    assert ring == pytest.approx(size * 7 / 8 / 335e9, rel=0.06)


def test_attention_follows_the_pairs_of_its_mask():
    kernels = data.load_kernels(data.load_cluster("dgx-h100", 1))

    def seconds(mode: str, case: float, window: float = 0) -> float:
        sizes = attention_sizes(mode, 2, 4096, 16, 4, window)
        return _seconds(kernels, f"attention_{mode}", "bf16", sizes, case)

    # FLOPs without a mask are twice those of a causal one, and the table follows them.
    pairs = attention_sizes("full", 2, 4096, 16, 4, 0)
    full = _seconds(kernels, "attention_causal", "bf16", pairs, 128)
    assert full == pytest.approx(2 * seconds("causal", 128), rel=0.05)
    assert seconds("full", 64) == pytest.approx(2 * seconds("causal", 64), rel=0.25)
    assert seconds("window", 128, 128) < 0.5 * seconds("causal", 128)
    # A window of all tokens is a causal mask.
    causal = attention_sizes("causal", 2, 4096, 16, 4, 0)
    assert attention_sizes("window", 2, 4096, 16, 4, 9999) == causal


def test_unequal_loads_take_longer():
    kernels = data.load_kernels(data.load_cluster("gb200-nvl72", 1))
    shape = {"tokens": 8192, "hidden": 7168, "width": 2048, "topk": 8, "experts": 256, "ep": 8}
    cases = [table.case for table in kernels.find_shapes("experts", "bf16")]
    times = [_seconds(kernels, "experts", "bf16", shape | {"matrices": 3}, c) for c in cases]
    assert len(times) == 3
    assert times == sorted(times)
    assert _seconds(kernels, "experts", "bf16", shape | {"matrices": 2}) < times[0]


def test_a_machine_without_tables_has_none():
    kernels = data.load_kernels(data.load_cluster("mi300x", 1))
    assert kernels.shapes == {}
    assert gemm_latency(kernels, "bf16", 1, 1, 1) is None
    # No balanced loads were measured on A100.
    kernels = data.load_kernels(data.load_cluster("dgx-a100", 1))
    assert min(table.case for table in kernels.find_shapes("experts", "bf16")) > 0


def test_products_are_written_as_read():
    assert data.parse_product("batch*heads/kv_heads") == (
        ("batch", 1),
        ("heads", 1),
        ("kv_heads", -1),
    )


def _rows(kernel: dict[str, Any], **columns: tuple[Any, ...]) -> list[dict[str, Any]]:
    return [kernel | dict(zip(columns, row, strict=True)) for row in it.product(*columns.values())]


def _seconds(
    kernels: data.Kernels, kernel: str, dtype: str, sizes: Mapping[str, float], case: float = 0
) -> float:
    (table,) = (one for one in kernels.find_shapes(kernel, dtype) if one.case == case)
    return shape_latency(table, sizes)


def _write(path, rows):
    pl.DataFrame(rows, infer_schema_length=None).write_csv(path)
    return str(path)


@pytest.fixture
def csv(tmp_path):
    rows = _rows({"kernel": "gemm", "dtype": "bf16"}, m=_SIZES, n=_SIZES, k=_SIZES)
    for row in rows:
        row["latency_s"] = _law(row["m"], row["n"], row["k"])
    heads = {"heads": (8,), "kv_heads": (8,), "head_dim": (64, 128), "causal": (0, 1)}
    more = _rows({"kernel": "attention"}, batch=(1, 4), sequence=(1024, 4096), **heads)
    for row in more:
        row["latency_s"] = 1e-13 * row["batch"] * row["sequence"] ** 2 * row["head_dim"]
    loads = {"experts": (8, 64), "ep": (1, 8), "exponent": (0, 1.2)}
    some = _rows({"kernel": "experts"}, tokens=(512, 4096), hidden=(2048,), topk=(2,), **loads)
    for row in some:
        row |= {"intermediate": 4096, "latency_s": 1e-6 * row["tokens"] / row["ep"]}
    return _write(tmp_path / "kernels.csv", rows + more + some)


def test_the_command_fits_tests_and_writes(csv, tmp_path, answered, refused):
    out = str(tmp_path / "out")
    words = ["fit-kernels", csv, "--device", "mine", "--out", out]
    text = answered([*words, "--ask", "gemm bf16 m=99999 n=512 k=512"])
    assert "`m` is 99999, beyond the fitted range from 256 to 16384" in text
    (table,) = read_shapes(pathlib.Path(out) / "shapes.csv")["gemm bf16"]
    assert shape_latency(table, {"m": 512, "n": 512, "k": 512}) == pytest.approx(
        _law(512, 512, 512), rel=0.01
    )
    assert "--force" in refused(words)
    asked = ["--ask", "gemm bfloat16 m=512 n=512 k=512", "--force", "--json", "--sms", "132"]
    found = answered([*words, *asked])
    assert found["asked"]["outside"] == []
    assert "within the fitted range" in found["asked"]["text"]
    assert found["asked"]["latency_s"] == pytest.approx(_law(512, 512, 512), rel=0.01)
    names = {(row["kernel"], row["case"]) for row in found["tables"]}
    kinds = it.product(("attention_causal", "attention_full"), (64, 128))
    assert names == {("gemm", 0), ("experts", 0), ("experts", 1.2), *kinds}
    (gemm,) = [row for row in found["tables"] if row["kernel"] == "gemm"]
    assert gemm["error"] < 0.01
    assert gemm["range"]["m"] == [256, 16384]


_GEMM = {"kernel": "gemm", "dtype": "bf16", "m": 1, "n": 1, "k": 1, "latency_s": 1.0}


def test_operators_are_scored(tmp_path):
    about = {"device": "h100_sxm", "dtype": "bfloat16", "latency_s": 1.6e-3}
    rows = [about | {"m": 8192, "n": 8192, "k": 8192}, about | {"m": 256, "n": 256, "k": 256}]
    pl.DataFrame(rows).write_parquet(tmp_path / "gemm.parquet")
    found = operator_rows(tmp_path)
    names = ["gemm bf16 h100_sxm", "gemm below 10 GFLOP bf16 h100_sxm"]
    assert [row["table"] for row in found] == names
    assert found[0]["name"] == "gemm m=8192 n=8192 k=8192"
    assert found[0]["measured"] == 1.6e-3
    assert found[0]["predicted"] == pytest.approx(1.54e-3, rel=0.06)
    assert "| gemm bf16 h100_sxm | 1 |" in operator_table(found)


_PEAKS = {"gemm:linear": "compute", "gemm:linear:backward": "compute"}
_PEAKS |= {f"rowwise:{name}": "memory" for name in ("residual_add", "gelu", "causal_softmax_fused")}
_PEAKS |= {f"rowwise:{name}:backward": "memory" for name in ("gelu", "softmax", "mask_fill")}


@pytest.mark.parametrize(("kernel", "bound"), _PEAKS.items())
def test_a_gh200_follows_from_an_a100_and_a_peak(kernel, bound):
    """Large calls are as much faster as the peak that bounds them is higher."""
    a100, gh200 = (data.load_device(name) for name in ("a100-80g-sxm", "gh200-96g"))
    higher = gh200.memory_bandwidth_bytes_per_s / a100.memory_bandwidth_bytes_per_s
    if bound == "compute":
        higher = gh200.peak_flop_per_s["fp16"] / a100.peak_flop_per_s["fp16"]
    old, new = (load_shapes(device.name)[f"{kernel} bf16"][0] for device in (a100, gh200))
    high = {name: min(ends[1], new.ranges[name][1]) for name, ends in old.ranges.items()}
    parts = np.random.default_rng(0).uniform(0.25, 1, (len(high), 200))
    sizes = {name: part * end for (name, end), part in zip(high.items(), parts, strict=True)}
    errors = np.log(shape_latencies(old, sizes) / higher / shape_latencies(new, sizes))
    assert abs(np.median(errors)) < 0.15


def test_phases_have_tables_of_their_own(tmp_path):
    row = _GEMM | {"phase": "backward"}
    rows = [row, _GEMM | {"phase": "forward"}, _GEMM | {"phase": None}]
    found = read_kernels(_write(tmp_path / "table.csv", rows))
    assert {one.kernel: len(one.seconds) for one in found} == {"gemm": 2, "gemm:backward": 1}
    with pytest.raises(ValueError, match="No phase `back`; did you mean `backward`"):
        read_kernels(_write(tmp_path / "wrong.csv", [row | {"phase": "back"}]))


def test_more_nodes_have_the_bandwidth_of_the_most_that_were_fitted():
    (table,) = load_shapes("a100-80g-sxm")["all_reduce_nodes:perlmutter "]
    sizes = {"sent": 1e9, "gpus_per_node": 1}
    four, eight = (shape_latency(table, sizes | {"nodes": nodes}) for nodes in (4, 8))
    assert eight == pytest.approx(four)


def test_calls_of_training_are_scored(tmp_path):
    about = {"device": "gh200", "dtype": "float16", "seconds": 75e-6, "flag": "", "tp": None}
    row = about | {"operator": "linear_qkv", "m": 2048.0, "n": 6144.0, "k": 2048.0}
    keys = ("batch", "heads", "sequence", "hidden", "vocab", "tensors", "params", "count")
    row |= dict.fromkeys(keys) | {"head_dim": None, "phase": "forward"}
    rows = [row, row | {"phase": "backward", "seconds": 163e-6}, row | {"flag": "faster_than_peak"}]
    table = pl.DataFrame(rows, infer_schema_length=None)
    table.write_parquet(tmp_path / "backward_operators.parquet")
    found = training_operator_rows(tmp_path)["rows"]
    assert [row["table"] for row in found] == ["forward", "backward"]
    for row in found:
        assert row["predicted"] == pytest.approx(row["measured"], rel=0.15)


def test_convolutions_have_the_operations_of_measured_ones(shared):
    """Their times are of float32 without tensor cores, which no table has."""
    rows = pl.read_parquet(shared / "data" / "operators" / "convolutions.parquet")
    costs = job_parts(data.load_job("stable-diffusion-2-a100-8"))
    for row in rows.sample(20, seed=0).iter_rows(named=True):
        sizes = {"microbatch_size": row["batch"], "sequence_length": row["out_size"] ** 2}
        training = replace(costs.training, **sizes)
        linear = convolve(
            replace(costs, training=training),
            row["out_channels"],
            row["in_channels"],
            row["kernel"],
            row["stride"],
        )
        assert linear.forward.flop == row["flops"]


def test_measured_communication_is_met(shared, tmp_path):
    for name in ("collectives", "deepep", "nvlink_alltoall"):
        file = f"{name}.parquet"
        (tmp_path / file).symlink_to(shared / "data" / "operators" / file)
    rows = operator_rows(tmp_path)
    errors = np.log([row["predicted"] / row["measured"] for row in rows])
    assert len(rows) > 10_000
    assert errors.std() < 0.1
    assert abs(errors.mean()) < 0.01
