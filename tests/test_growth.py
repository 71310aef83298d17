"""Growth of steps with GPUs: series of published steps as jobs."""

import csv

import numpy as np
import pytest

from validation.growth import Series, fitted, growth_rows, growth_table


_ROW = {"family": "f", "model": "Llama3-8B", "dtype": "bf16", "release": "v1"}
_ROW |= {"seq": "8192", "source": "dgxc-benchmarking x", "gpu_type": "DGX-H100"}
_SHAPE = {"layers": "32", "hidden": "4096", "heads": "32", "kv_heads": "8", "ffn": "14336"}
_SHAPE |= {"vocab": "128256", "tp": "1", "pp": "1", "cp": "1", "ep": "1", "micro_batch": "1"}
_EMPTY = ("note", "zero", "recompute", "seq_parallel", "vpp", "dp")


@pytest.fixture
def folder(tmp_path):
    """Two series, of which only the first is of rows with a job."""
    growth, means = [], []
    for gpus, relative in ((8, "1.0"), (16, "1.01"), (64, "1.03")):
        one = {**_ROW, "gpus": str(gpus), "global_batch": str(gpus), "step_time_s": relative}
        means.append({**one, **_SHAPE, **dict.fromkeys(_EMPTY, ""), "measured_steps_row": ""})
        more = {"scaling": "weak, data-parallel", "layout": "", "relative_time": relative}
        growth.append({**one, **more, "series": "a"})
        growth.append({**one, **more, "series": "b", "family": "unknown"})
        growth.append({**one, **more, "series": "c", "scaling": "strong"})
    growth.sort(key=lambda row: row["series"])
    (tmp_path / "steps").mkdir()
    for name, rows in (("growth", growth), ("step_means", means)):
        with (tmp_path / "steps" / f"{name}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    return tmp_path


def test_rows_of_weak_scaling_are_relative_to_the_fewest_gpus(folder):
    rows = growth_rows(folder)
    assert [row["name"] for row in rows] == [f"{x}, {n} GPUs" for x in "ab" for n in (16, 64)]
    np.testing.assert_allclose([row["measured"] for row in rows], [0.01, 0.03] * 2)
    assert -0.01 < rows[0]["predicted"] < rows[1]["predicted"] < 0.2
    assert all("predicted" not in row and row["reason"] for row in rows[2:])
    assert "| all | 2 | +2.0 % |" in growth_table(rows)


def test_published_series_grow_as_predicted(shared):
    """Half of the rows are within one percentage point; to predict none would be 2.1 off."""
    rows = [row for row in growth_rows(shared / "data") if "predicted" in row]
    errors = 100 * np.array([row["predicted"] - row["measured"] for row in rows])
    assert len(errors) > 80
    assert np.median(np.abs(errors)) < 1
    assert abs(np.median(errors)) < 0.5


def test_the_fit_of_the_level_recovers_a_planted_one():
    rng = np.random.default_rng(0)
    replicas = np.array([4.0, 32.0, 256.0])
    truth = np.array([0.2, 0.03, 0.006])
    series = []
    for family in "abcdef":
        network = rng.uniform(0.02, 0.2, (3, 1)) * np.exp([[0, 0.1, 0.25, 0.5]])
        steps = np.hstack([1 + network, (1 + network[:, :1]) * replicas[:, None] ** 0.01])
        steps *= rng.uniform(2, 20, (3, 1))  # As if each scale had other work.
        one = Series(family, True, np.zeros(3), steps)
        series.append(one._replace(measured=np.array([0.0, *one.errors(truth)])))
    np.testing.assert_allclose(fitted(series), truth, rtol=0.1)
