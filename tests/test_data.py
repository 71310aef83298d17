import itertools as it
import math
import pathlib
import subprocess
import sys
import tomllib
from typing import Any

import msgspec
import pytest

import prism_jax
import prism_jax as prism
from prism_jax import data
from prism_jax.latency import families
from prism_jax.workload import count_parameters

from .helpers import kernels_of, lower_job


_ROOT = pathlib.Path(__file__).parents[1]


def test_importing_data_is_light():
    code = (
        "import sys, importlib.util, types\n"
        # The package's own `__init__` may import jax; this layer may not.
        "package = types.ModuleType('prism_jax')\n"
        f"package.__path__ = {[*prism_jax.__path__]!r}\n"
        "sys.modules['prism_jax'] = package\n"
        "import prism_jax.data, prism_jax.cluster, prism_jax.workload\n"
        "print([m for m in ('jax', 'polars', 'scipy', 'equinox') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


_BY_BITS = (("fp32",), ("tf32",), ("fp16", "bf16"), ("fp8", "mxfp8"), ("fp4",))


@pytest.mark.parametrize("name", data.list_names("device"))
def test_devices(name):
    device = data.load_device(name)
    assert device.name == name
    assert device.source
    assert 5e11 < device.memory_bandwidth_bytes_per_s < 1e13
    peaks = device.peak_flop_per_s
    assert {*peaks} <= {*it.chain(*_BY_BITS)}
    assert all(1e13 < peak < 2e16 for peak in peaks.values())
    # Fewer bits are no slower.
    widths = [[peaks[dtype] for dtype in bits if dtype in peaks] for bits in _BY_BITS]
    ordered = [peaks for peaks in widths if peaks]
    assert all(max(more) <= min(fewer) for more, fewer in it.pairwise(ordered))


@pytest.mark.parametrize("folder", ["devices", "clusters"])
def test_each_number_of_a_machine_has_its_source_beside_it(folder):
    for path in (_ROOT / "hardware" / folder).glob("*.toml"):
        for line in path.read_text().splitlines():
            key, _, value = line.partition("=")
            if "e" in value.partition("#")[0] and key.strip() not in ("kind", "kernels", "source"):
                assert "# source: " in value or value.strip().startswith('"'), (path, line)


@pytest.mark.parametrize("name", data.list_names("cluster"))
def test_clusters(name):
    one, cluster = prism.load_cluster(name, 1), prism.load_cluster(name, 10_000)
    assert cluster.name == name
    assert cluster.source
    assert cluster.num_devices == 10_000 * one.devices_per_node
    assert cluster.links[-1].group == cluster.num_devices
    # Within a node there is no network between nodes.
    assert one.links == cluster.links[:1]
    for link in cluster.links:
        assert 1e9 < link.bandwidth_bytes_per_s < 1e12
    kernels = data.load_kernels(cluster)
    kinds = {v.kernel for v in kernels.variability if v.component == "residual"}
    assert {"gemm", "attention", "elementwise", "norm", "all_gather", "send_recv"} <= kinds
    for component in ("rank", "step", "network"):
        assert kernels.find_variation(component) is not None


def test_a_family_needs_a_number_of_nodes(tmp_path):
    with pytest.raises(ValueError, match="`dgx-h100` is a family; say how many nodes it has"):
        prism.load_cluster("dgx-h100")
    # 18 trays of four GPUs are one NVLink domain; one tray more, and there is a network.
    assert [len(prism.load_cluster("gb200-nvl72", n).links) for n in (1, 18, 19)] == [1, 1, 2]
    job = prism.load_job("gpt3-175b-h100-768")
    assert job.cluster == prism.load_cluster("dgx-h100", 96)
    prism.save_job(job, tmp_path / "same.toml")
    assert "num_nodes = 96" in (tmp_path / "same.toml").read_text()
    assert prism.load_job(tmp_path / "same.toml").cluster == job.cluster
    text = (tmp_path / "same.toml").read_text()
    (tmp_path / "none.toml").write_text(text.replace("num_nodes = 96", ""))
    assert (
        prism.load_job(tmp_path / "none.toml").cluster == job.cluster
    )  # As many as the ranks need.
    with pytest.raises(ValueError, match=r"768.*only 8 devices; use smaller .* more `num_nodes`"):
        prism.load_job(tmp_path / "same.toml", "num_nodes=1")


def test_notes_name_the_tables_that_stand_in_for_others():
    def notes(*overrides):
        return prism.load_job("gpt3-175b-h100-768", overrides).notes

    assert notes() == ()
    (of_device,) = notes("cluster.device=b300", "training.dtype=fp8")
    assert "`b300` has no table of kernels of its own, so the table of `b200`" in of_device
    _, of_dtype = notes("cluster.device=b300", "training.dtype=fp4")
    assert "in fp4 is known here, so that of fp8" in of_dtype
    # Links that the tables do not know by name take the efficiencies of their place.
    amd, nvidia = prism.load_cluster("mi300x", 4), prism.load_cluster("dgx-a100", 4)
    for kind in ("all_gather", "all_reduce", "all_to_all", "send_recv"):
        for mine, theirs in zip(amd.links, nvidia.links, strict=True):
            found: Any = data.load_kernels(amd).find_efficiency(kind, mine.name)
            same = data.load_kernels(nvidia).find_efficiency(kind, theirs.name)
            assert msgspec.structs.replace(found, variant=theirs.name) == same


def test_kimi_k2_is_its_configuration():
    """Counted anew from the keys of the published config.json."""
    hidden, heads, words, experts, ffn, dense = 7168, 64, 163840, 384, 2048, 18432
    nope, rope, value, q_rank, kv_rank = 128, 64, 128, 1536, 512
    queries = hidden * q_rank + q_rank + q_rank * heads * (nope + rope)
    keys = hidden * (kv_rank + rope) + kv_rank + kv_rank * heads * (nope + value)
    attention = queries + keys + heads * value * hidden
    one = 3 * hidden * ffn
    of_experts = (experts + 1) * one + hidden * experts
    layers = 61 * (attention + 2 * hidden) + 3 * hidden * dense + 60 * of_experts
    expected = layers + 2 * words * hidden + hidden
    assert count_parameters(prism.load_model("kimi-k2")) == expected
    # Of these a token meets 8 experts and the shared one: the paper says 32.6 billion.
    at_work = expected - 60 * (experts - 8) * one
    assert at_work == pytest.approx(32.6e9, rel=0.01)


_MODELS = sorted(path.stem for path in (_ROOT / "jobs/models").glob("*.toml"))


@pytest.mark.parametrize("name", _MODELS)
def test_models(name):
    model = prism.load_model(name)
    assert model.name == name
    assert model.source


@pytest.mark.parametrize("name", data.list_names("job"))
def test_jobs(name):
    job: Any = prism.load_job(name)
    assert job.name == name
    assert job.source
    assert (job.measured is None) == ("no step of it was measured" in job.source)
    assert job.measured is None or job.measured.source
    assert job.layout.world_size == job.cluster.num_devices


def test_measured_steps_are_those_of_the_logs(shared):
    polars = pytest.importorskip("polars")
    steps = polars.read_parquet(shared / "data/mlperf/step_times.parquet")
    steps = steps.filter(polars.col("phase") == "steady")
    systems = {
        "gpt3-175b-h100-4096": "eos-dfw_n512_ngc23.09_nemo",
        "gpt3-175b-h100-768": "dgxh100_n96_nemo",
    }
    for name, system in systems.items():
        seconds = steps.filter(polars.col("system") == system)["step_time_s"]
        measured = prism.load_job(name).measured
        assert measured.num_samples == len(seconds)
        assert measured.mean_s == pytest.approx(seconds.mean(), rel=1e-3)
        assert measured.p50_s == pytest.approx(seconds.median(), rel=1e-3)
        assert measured.p95_s == pytest.approx(seconds.quantile(0.95), rel=1e-3)


@pytest.mark.parametrize("name", data.list_names("profile of kernels"))
def test_kernels_have_a_source(name):
    source = data.load_source(name)
    assert source.licence
    assert source.constants
    laws = data.load_variability(source.variability or name)
    assert laws == data.load_variability(name)
    assert laws
    for law in laws:
        assert law.source
        assert law.family in {*families(), "two-regimes"}
    of_another = source.variability is not None
    assert of_another != (_ROOT / "kernels" / name / "variability.csv").exists()


def test_efficiencies_are_sane_and_interpolated():
    kernels = data.load_kernels(prism.load_cluster("dgx-h100", 512))
    for table in kernels.efficiency:
        for value in table.values:
            assert 0 < value < 1.1
        assert table.at(0.5) == table.values[0]
        assert table.at(1e30) == table.values[-1]
        for size, value in zip(table.sizes, table.values, strict=True):
            assert table.at(size) == pytest.approx(value)
        middle = math.sqrt(table.sizes[0] * table.sizes[1])
        assert table.at(middle) == pytest.approx((table.values[0] + table.values[1]) / 2)
    assert kernels.find_efficiency("gemm", "fp8") is not None
    assert kernels.find_efficiency("gemm", "int3") is None


@pytest.mark.parametrize("name", ["slow_worker", "stage_imbalance"])
def test_a_job_of_a_trace_has_a_layout_and_a_schedule_only(shared, name):
    job = prism.load_job(shared / f"data/straggler_traces/{name}_job.toml")
    assert job.name == name
    assert job.model is None
    assert job.kernels is None
    assert job.layout.world_size == job.world_size


def test_overrides():
    job = prism.load_job(
        "gpt3-175b-h100-4096",
        (
            "layout.dp=64",
            "num_nodes=600",
            "cluster.links.infiniband.bandwidth_bytes_per_s=25e9",
            "cluster.device.memory_bytes = 96e9",
            "kernels.all_gather.sigma=0.1",
            "kernels.rank.sigma=0.03",
            "kernels.network.slowdown=2",
            "training.dtype=bf16",
            'training.recompute="full"',
            "model.num_kv_heads=8",
            "schedule.blocking=true",
            "measured.p99_s=2",
        ),
    )
    assert job.layout.dp == 64
    assert job.cluster.num_devices == 4800
    assert job.cluster.links[1].bandwidth_bytes_per_s == 25e9
    assert job.cluster.device.memory_bytes == 96e9
    assert (job.training.dtype, job.training.recompute) == ("bf16", "full")
    assert job.model.num_kv_heads == 8
    assert job.schedule.blocking is True
    assert job.measured.p99_s == 2.0
    kernels = job.kernels
    assert kernels.find_variation("residual", "all_gather").parameters["sigma"] == 0.1  # pyright: ignore
    assert kernels.find_variation("rank").parameters["sigma"] == 0.03  # pyright: ignore
    assert kernels.find_variation("network").parameters["slowdown"] == 2.0  # pyright: ignore
    # What was not named is as it was.
    before = prism.load_job("gpt3-175b-h100-4096").kernels
    assert kernels.find_variation("step") == before.find_variation("step")


def test_overrides_take_names():
    job = prism.load_job(
        "megatron-175b-a100-64",
        (
            "model=megatron-22b",
            "cluster=dgx-h100",
            "num_nodes=8",
            "cluster.device=h200-sxm",
            "layout.pp=1",
        ),
    )
    assert job.model == prism.load_model("megatron-22b")
    assert job.cluster.device == data.load_device("h200-sxm")


def test_a_file_of_ones_own(tmp_path, written):
    (tmp_path / "gpu.toml").write_text(
        'kind = "device"\nmemory_bytes = 1e9\nmemory_bandwidth_bytes_per_s = 1e12\n'
        "peak_flop_per_s = { bf16 = 1e14 }\n"
    )
    (tmp_path / "machine.toml").write_text(
        'kind = "cluster"\ndevice = "gpu.toml"\nnum_nodes = 1\ndevices_per_node = 8\n'
        '[[links]]\nname = "nvlink"\ngroup = 8\nbandwidth_bytes_per_s = 1e11\n'
    )
    path = written(
        "mine.toml",
        'kind = "job"\ncluster = "machine.toml"\n'
        "model = { num_layers = 2, hidden_size = 64, num_heads = 4, ffn_size = 256, "
        "vocab_size = 100 }"
        '\n[layout]\ntp = 2\n[schedule]\nkind = "1f1b"\nnum_microbatches = 1\n'
        "[training]\nmicrobatch_size = 1\nsequence_length = 128\n",
    )
    job = prism.load_job(path)
    assert job.name == "mine"
    assert job.model.hidden_size == 64
    assert job.cluster.device.name == "gpu"
    assert [source.name for source in job.kernels.sources] == ["h100-sxm", "dgx-h100"]
    # What stands in for tables that a machine lacks is said.
    assert [s.stands_in_for for s in job.kernels.sources] == ["device `gpu`", "cluster `machine`"]
    assert "device `gpu` has no table" in job.kernels.notes[0]
    assert "the table of `dgx-h100` is used" in job.kernels.notes[1]
    for name in data.list_names("cluster"):
        cluster = prism.load_cluster(name, 1)
        known = data.list_names("profile of kernels")
        both = (cluster.device, cluster)
        machines = [m for m in both if (m.kernels or m.name) != m.name or m.name not in known]
        assert len(data.load_kernels(cluster).notes) == len(machines), name
    assert prism.load_job(str(path), "layout.tp=4").layout.tp == 4


def test_every_file_is_toml_of_a_kind():
    for folder in ("hardware", "kernels", "jobs"):
        for path in (_ROOT / folder).rglob("*.toml"):
            assert "kind" in tomllib.loads(path.read_text()), path


def test_structs_are_immutable():
    job = prism.load_job("megatron-22b-a100-8")
    with pytest.raises(AttributeError):
        job.layout.tp = 2  # pyright: ignore
    assert msgspec.structs.replace(job.layout, tp=2).tp == 2


def test_a_software_stack_gives_the_defaults_of_a_job():
    for name in data.list_names("software stack"):
        assert data.load_software(name).source
    old = prism.load_job("megatron-22b-a100-8", "training.software=megatron-2021").training
    assert (old.overlap_tp_backward, old.launch_floor_s) == (False, 3.8e-6)
    # The job says what it computes again and how it splits norms; an override says the rest.
    plain = prism.load_job(
        "megatron-22b-a100-8", ("training.software=torchtitan", "training.prefetch=2")
    )
    assert (plain.training.zero, plain.training.attention) == (0, "unfused")
    assert (plain.training.prefetch, plain.training.overlap_tp_backward) == (2, False)


def test_no_kernel_is_shorter_than_its_launch():
    job = prism.load_job("megatron-22b-a100-8", "training.launch_floor_s=1e-3")
    kernels = {k for k in kernels_of(lower_job(job).forward[0]) if k.link is None}
    assert min(kernel.mean for kernel in kernels) == 1e-3
    assert max(kernel.mean for kernel in kernels) > 1e-3


@pytest.mark.parametrize("num_nodes", [1, 4])
def test_a_saved_network_joins_all_nodes(tmp_path, num_nodes):
    given = pathlib.Path(__file__).parent.parent / "examples/job.toml"
    smaller = (f"num_nodes={num_nodes}", f"layout.dp={num_nodes}")
    job = prism.load_job(given, smaller)
    prism.save_job(job, tmp_path / "job.toml")
    assert prism.load_job(tmp_path / "job.toml") == job
    if num_nodes > 1:
        larger = ("num_nodes=16", "layout.dp=16")
        again = prism.load_job(tmp_path / "job.toml", larger)
        assert again.cluster == prism.load_job(given, larger).cluster
    else:  # Its network is left out, and the link within a node stays that.
        text = (tmp_path / "job.toml").read_text()
        assert "group = 8" in text
