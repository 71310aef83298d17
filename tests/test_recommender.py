"""Recommenders: sizes of MLPerf's model, what tables look up and send, a trace of eight GPUs."""

import itertools as it
import json
import math
import tarfile
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

import prism_jax as prism
from prism_jax.cluster import gemm_latency
from prism_jax.data import load_job, load_model
from prism_jax.profile import replayed_step_times, traced_graph
from prism_jax.trace import outline, read_profile_traces
from prism_jax.workload import count_parameters
from prism_jax.workload.modules._recommender import EmbeddingTable, vectors_of

from .helpers import flop_of, kernels_of, lower_job


_JOB = "dlrm-dcnv2-gb300-64"
_BATCH, _WIDTH = 2112, 128
_ROWS = "{rows = 1000, pooling_factor = 4"


def _job(*overrides: str) -> Any:
    return load_job(_JOB, overrides)


def _tables(*tables: str, gpus: int = 4) -> Any:
    """The job with other tables on fewer GPUs; the cross layers and the MLPs stay."""
    shared = any("data_parallel" not in one for one in tables)
    layout = (f"layout.dp={gpus}", f"layout.ep={gpus if shared else 1}", "num_nodes=1")
    return _job(*layout, f"model.modules.features.tables=[{', '.join(tables)}]")


def _found(block, kind: str) -> list[tuple[str, int]]:
    return [(k.size.split()[0], n) for k, n in kernels_of(block).items() if k.kind == kind]


def test_the_model_has_the_published_sizes():
    """MLPerf's tables have 204,184,588 rows, of which a sample looks up 214."""
    model: Any = load_model("dlrm-dcnv2")
    tables = model.modules["features"]["tables"]
    assert (len(tables), sum(one["pooling_factor"] for one in tables)) == (26, 214)
    bottom = 13 * 512 + 512 * 256 + 256 * 128 + (512 + 256 + 128)
    cross = 3 * (2 * 3456 * 512 + 3456)
    top = 3456 * 1024 + 1024 * 1024 + 1024 * 512 + 512 * 256 + 256 + (1024 + 1024 + 512 + 256 + 1)
    assert count_parameters(model) == 204_184_588 * _WIDTH + bottom + cross + top


def test_products_run_once_forward_and_twice_backward():
    work = lower_job(_job())
    bottom = 13 * 512 + 512 * 256 + 256 * 128
    top = 3456 * 1024 + 1024 * 1024 + 1024 * 512 + 512 * 256 + 256
    forward = 2 * _BATCH * (bottom + 3 * 2 * 3456 * 512 + top)
    assert flop_of(work.forward) == forward
    # Nothing needs the gradient of the dense features.
    assert flop_of(work.backward) == 2 * forward - 2 * _BATCH * 13 * 512


def test_dot_products_of_pairs():
    job = _job()
    dot = {**job.model.modules, "cross": {"kind": "dot-interaction", "num_vectors": 27}}
    work = lower_job(replace(job, model=replace(job.model, modules=dot)))
    pairs = 3 * 2 * _BATCH * 27 * 27 * _WIDTH
    for block in (work.forward[0], work.backward[0]):
        found = kernels_of(block).items()
        assert sum(k.flop * n for k, n in found if f"{_BATCH}x27x" in k.size) == pairs


@pytest.mark.parametrize(
    ("tables", "looked_up", "sent", "received"),
    [
        # One of four GPUs looks up four rows for the samples of each, and sends a vector to each.
        ((EmbeddingTable(1000, 4.0),), 4 * 4, 4, 1),
        # A quarter of the rows, but a vector of sums of it; all as in a reduce_scatter.
        ((EmbeddingTable(1000, 4.0, "row_wise"),), 4, 4, 4),
        # A quarter of each row.
        ((EmbeddingTable(1000, 4.0, "column_wise"),), 4, 1, 1),
        ((EmbeddingTable(1000, 4.0, "row_wise", 2),), 2 * 4, 4, 2),
        ((EmbeddingTable(1000, 4.0, "data_parallel"),), 4, 0, 0),
        # One table for each GPU, and the largest is alone.
        (tuple(EmbeddingTable(10, float(n)) for n in (9, 1, 2, 3, 2)), 4 * 9, 4 * 2, 5),
    ],
)
def test_vectors_that_shards_look_up_and_send(tables, looked_up, sent, received):
    assert vectors_of(tables, 4) == pytest.approx((looked_up, sent, received), rel=1e-12)


def test_no_rule_of_placement_has_less_than_brute_force():
    """The fullest of three GPUs by the greedy rule is at most 4/3 of the best of all placements
    (Graham 1969), of what is looked up and sent together."""
    rng = np.random.default_rng(0)
    for _ in range(5):
        factors = [float(n) for n in rng.integers(1, 30, 7)]
        tables = tuple(EmbeddingTable(10, one) for one in factors)
        best = min(
            max(
                sum(f + 1 for f, at in zip(factors, where, strict=True) if at == g)
                for g in (0, 1, 2)
            )
            for where in it.product((0, 1, 2), repeat=7)
        )
        looked_up, sent, received = vectors_of(tables, 3)
        assert received == 7
        assert 3 * best <= looked_up + sent
        assert looked_up <= 3 * (4 / 3 - 1 / 9) * best


@pytest.mark.parametrize(
    ("sharding", "rows", "sums"),
    [("table_wise", 16, 4), ("row_wise", 4, 4), ("column_wise", 4, 1), ("data_parallel", 4, 0)],
)
def test_bytes_of_tables_and_exchanges(sharding, rows, sums):
    """Float32 rows are read forward, and with a state read and written backward; sums in 16 bits
    are exchanged once each way."""
    job = _tables(f'{_ROWS}, sharding = "{sharding}"}}')
    work, values = lower_job(job), _BATCH * _WIDTH
    sent = [(f"{2 * sums * values}B", 1)] if sums else []
    for block, each in ((work.forward[0], 4 * rows + 2 * sums), (work.backward[0], 18 * rows)):
        assert _found(block, "all_to_all") == sent
        assert _found(block, "embedding") == [(f"{each * values}B", 1)]
    # Gradients of copies are reduced with the others.
    (reduced,) = [k.size for k in kernels_of(work.reduce_scatter[0])]
    dense = count_parameters(job.model) - (0 if sharding == "data_parallel" else 1000 * _WIDTH)
    assert reduced.startswith(f"{2 * dense}B dp4")


def test_the_bottom_mlp_runs_beside_the_exchange():
    for block in (lower_job(_job()).forward[0], lower_job(_job()).backward[0]):
        ((branches, segment),) = [(one.branches[0], one) for one, _ in block if one.branches]
        (((exchange, _),),) = branches.communication
        assert (exchange.kind, segment.members) == ("all_to_all", 64)
        assert {kernel.kind for kernel, _ in branches.compute} == {"gemm"}


def test_tables_take_eight_bytes_a_value_on_the_gpus_that_share_them():
    job = _tables(f"{_ROWS}}}", f'{_ROWS}, sharding = "data_parallel"}}')
    parts = prism.memory(job).ranks[0].parts
    dense = count_parameters(job.model) - 1000 * _WIDTH
    # One table, which one GPU has: the fullest.
    assert parts["tables"] == 8 * 1000 * _WIDTH
    rows = _tables(f'{_ROWS}, sharding = "row_wise"}}')
    assert prism.memory(rows).ranks[0].parts["tables"] == 8 * 1000 * _WIDTH / 4
    # Adagrad: a copy in float32 and one moment.
    assert (parts["parameters"], parts["optimizer"]) == (2 * dense, 8 * dense)
    adam = _job("training.optimizer=adam")
    more = (
        prism.memory(adam).ranks[0].parts["optimizer"]
        / prism.memory(_job()).ranks[0].parts["optimizer"]
    )
    assert more == pytest.approx(12 / 8)


def test_products_take_as_long_as_measured_by_shape():
    job = _job()
    found = {k.size: k.mean for k in kernels_of(lower_job(job).forward[0])}
    ratios = []
    for n, k in ((1024, 3456), (512, 3456), (256, 512)):
        measured: Any = gemm_latency(job.kernels, "bf16", _BATCH, n, k)
        ratios.append(found[f"fp16 {_BATCH}x{n}x{k} short"] / measured)
    # As much longer as all compute on so many replicas.
    assert ratios == pytest.approx([ratios[0]] * 3, rel=1e-12)
    assert 1 <= ratios[0] < 1.05


def test_a_step_without_adam_reads_no_norm():
    """The norm of gradients, their scalar all_reduce, and the second moment."""
    tails = {
        name: kernels_of(lower_job(_job(f"training.optimizer={name}")).tail)
        for name in ("adam", "adagrad")
    }
    dense = count_parameters(load_model("dlrm-dcnv2")) - (204_184_588 - 1369) * _WIDTH
    sizes = {
        name: sorted(k.size for k in tail if k.kind == "optimizer") for name, tail in tails.items()
    }
    assert sizes == {
        "adam": sorted([f"{4 * dense}B", f"{30 * dense}B"]),
        "adagrad": [f"{22 * dense}B"],
    }
    assert sum(k.kind == "all_reduce" for k in tails["adam"]) == 1
    assert all(k.kind != "all_reduce" for k in tails["adagrad"])


def test_the_shipped_job_is_of_no_class_of_published_runs():
    error = prism.expected_error(_job())
    assert error.num_runs == 0
    assert math.isclose(sum((found := prism.predict(_job())).breakdown.values()), found.mean)


def test_layouts_of_a_recommender_share_its_tables():
    job = _job()
    found = prism.enumerate_layouts(
        job.model,
        job.cluster,
        64,
        training=job.training,
        batch_size=job.batch_size,
        space=prism.LayoutSpace(microbatch_size=(_BATCH,)),
    )
    assert {one.layout for one in found} == {prism.Layout(dp=64, ep=64)}


@pytest.fixture(scope="module")
def traced(shared, tmp_path_factory):
    """One step of a DLRM on eight V100, as TorchRec names its parts: a file for each rank."""
    folder = tmp_path_factory.mktemp("dlrm")
    with tarfile.open(shared / "data/kineto/dlrm_kineto.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return folder / "dlrm_kineto"


@pytest.fixture(scope="module")
def traced_job(tmp_path_factory):
    path = tmp_path_factory.mktemp("job") / "job.toml"
    path.write_text(
        'kind = "job"\n[layout]\ndp = 8\n[schedule]\nkind = "1f1b"\nnum_microbatches = 1\n'
    )
    return path


def test_a_trace_of_torchrec_is_read(traced, answered):
    """Counts and times are those of the files' own events."""
    events = [
        event
        for path in sorted(traced.iterdir())
        for event in json.loads(path.read_text())["traceEvents"]
        if event.get("cat") == "kernel"
    ]
    sent = sum(event["dur"] for event in events if "SendRecv" in event["name"])
    found = answered(["trace", str(traced), "--json"])
    assert found["events"]["kernel"] == len(events)
    (exchange,) = [one for one in found["kernels"] if "SendRecv" in one["name"]]
    assert exchange["total_s"] == pytest.approx(sent * 1e-6)
    # Each rank exchanges vectors, gradients, and three times what rows it needs next.
    assert exchange["calls"] == 8 * 5
    assert set(found["ops"].values()) == {8}


def test_a_trace_of_a_recommender_is_replayed_and_read_by_fit(
    traced, traced_job, tmp_path, refused
):
    """What a fit begins with is there: a replay of the step takes as long as the step."""
    trace = read_profile_traces(traced, load_job(traced_job))
    again = replayed_step_times(*traced_graph(trace, outline(trace)))
    assert again == pytest.approx(trace.step_times(), rel=0.01)
    words = ["fit", str(traced), "--format", "kineto", "--job", str(traced_job)]
    assert "at least 4 are needed" in refused([*words, "--out", str(tmp_path / "profile")])
