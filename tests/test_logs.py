"""Logs: the same steps, as each framework writes them, are the same step times; and steps that
start, save or evaluate do not count, while slow steps do.
"""

import functools as ft
import json
import pathlib
import struct
import tomllib
from typing import Any

import numpy as np
import pytest

from prism_jax.data import load_job
from prism_jax.logs import LeftOut, read_log, read_ranks

from .helpers import refusal


_TIMES = np.round(3.1 + 0.02 * np.random.default_rng(7).standard_normal(60), 4)
_JOB = load_job("examples/job.toml")
_TOKENS, _GPUS, _SAMPLES = _JOB.tokens_per_step, _JOB.layout.world_size, _JOB.batch_size

_FORMATS = tomllib.loads((pathlib.Path(__file__).parent / "data/log_lines.toml").read_text())


def line(framework: str, i: int, s: float) -> str:
    """What a framework prints of a step by its number and its time."""
    rates = {"samples_per_s": _SAMPLES / s, "tokens_per_s": _TOKENS / _GPUS / s}
    return _FORMATS[framework].format(i=i, s=s, ms=1e3 * s, steps_per_s=1 / s, **rates)


LINES = {name: ft.partial(line, name) for name in _FORMATS}
# Those whose rates are rounded.
_ROUNDED = {"torchtitan": 2e-4, "MindFormers": 2e-4}


@pytest.mark.parametrize("framework", LINES)
def test_a_log_has_the_step_times_that_were_printed(framework, tmp_path):
    log = tmp_path / "train.log"
    lines = [LINES[framework](i + 1, s) for i, s in enumerate(_TIMES)]
    log.write_text("\n".join(["setting up", *lines, "done"]))
    measured = read_log(log, _JOB)
    assert len(measured.runs) == 1
    assert not measured.left_out
    np.testing.assert_allclose(measured.runs[0], _TIMES, rtol=_ROUNDED.get(framework, 1e-4))


def test_a_rate_is_a_time_only_with_the_batch_of_a_job(written):
    log = written("train.log", (LINES["torchtitan"](i + 1, s) for i, s in enumerate(_TIMES)))
    refusal(lambda: read_log(log), "is a rate of tokens, and no batch is known; give")


def _events(times):
    """An event file of TensorBoard with a scalar: a `simple_value`, then a tensor."""

    def field(number, content):
        return bytes([number << 3 | 2, len(content)]) + content

    records = []
    for i, time in enumerate(times):
        number = struct.pack("<f", time)
        tensor = field(8, b"\x08\x01" + field(4, number))
        value = tensor if i % 2 else b"\x15" + number
        summary = field(1, field(1, b"iteration-time") + value)
        event = b"\x09" + struct.pack("<d", 1e9 + i) + b"\x10" + bytes([i + 1]) + field(5, summary)
        records.append(struct.pack("<Q", len(event)) + bytes(4) + event + bytes(4))
    return b"".join(records)


def _tables(times):
    """Files of the same steps, by their names, and the options that they need."""
    steps = range(1, len(times) + 1)
    walls = np.cumsum([1.7e9, *times])
    history = [{"_step": i, "perf/step_time": s} for i, s in zip(steps, times, strict=True)]
    titles = ['"Step"', '"a - perf/step_time"', '"a - perf/step_time__MIN"']
    return {
        "wandb.csv": "\n".join(
            [",".join(titles), *(f'"{i}","{s}","0.1"' for i, s in zip(steps, times, strict=True))]
        ),
        "history.json": json.dumps(history),
        "metrics.jsonl": "\n".join(
            json.dumps({"step": i, "train": {"dt": s}}) for i, s in zip(steps, times, strict=True)
        ),
        "loss.csv": "\n".join(
            ["Wall time,Step,Value", *(f"{w:.6f},{i},9.5" for i, w in enumerate(walls))]
        ),
        "tensorboard.json": json.dumps(
            [[w, i, s * 1e3] for i, w, s in zip(steps, walls[1:], times, strict=True)]
        ),
        "events.out.tfevents.1700000000.node": _events(times),
        "rates.csv": "\n".join(
            ["step,rate", *(f"{i},{_SAMPLES / s:.9g}" for i, s in zip(steps, times, strict=True))]
        ),
    }


@pytest.mark.parametrize("name", _tables(_TIMES))
def test_tables_of_metrics_have_the_same_step_times(name, tmp_path):
    content = _tables(_TIMES)[name]
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    options = {"column": "rate", "unit": "samples/s"} if name == "rates.csv" else {}
    measured = read_log(path, _JOB, **options)
    np.testing.assert_allclose(np.concatenate(measured.runs), _TIMES, rtol=1e-5)


def test_a_summary_and_the_state_of_a_trainer_have_one_level(tmp_path):
    state = {"log_history": [{"loss": 2.0, "step": 1}, {"train_runtime": 188.4, "step": 60}]}
    (tmp_path / "trainer_state.json").write_text(json.dumps(state))
    summary = {"_step": 99, "perf": {"step_time": 3.14}, "loss": 2.0}
    (tmp_path / "wandb-summary.json").write_text(json.dumps(summary))
    for name in ("trainer_state.json", "wandb-summary.json"):
        (run,) = read_log(tmp_path / name).runs
        assert run.tolist() == pytest.approx([3.14])


def _log(times, between=None):
    """A log of Megatron-LM; `between` are the lines before some steps."""
    lines = (
        text
        for i, s in enumerate(times)
        for text in ((between or {}).get(i + 1), LINES["Megatron-LM"](i + 1, s))
    )
    return "\n".join(filter(None, lines))


def test_what_compiles_saves_and_evaluates_does_not_count(written):
    times = np.concatenate([_TIMES, _TIMES + 0.01])
    slow = times.copy()
    slow[:3] *= 4, 1.5, 1.2  # At the start.
    slow[[30, 77]] += 1.3  # Step 31 after a checkpoint, 78 after an evaluation.
    slow[[24, 49, 74, 99]] += 0.9  # Steps 25, 50, 75 and 100: without a name.
    slow[[60, 91, 92, 93]] += 2.0  # A stall and a burst.
    saved = "successfully saved checkpoint from iteration      30 to /data"
    lines = {31: saved, 78: " validation loss at iteration 77 | lm loss value: 2.1"}
    log = written("train.log", _log(slow, lines))
    measured = read_log(log)
    assert {*measured.left_out} == {
        *(LeftOut("start", 3), LeftOut("checkpoint", 1)),
        *(LeftOut("evaluation", 1), LeftOut("periodic", 4)),
    }
    away = [0, 1, 2, 30, 77, 24, 49, 74, 99]
    np.testing.assert_allclose(measured.runs[0], np.delete(slow, away), atol=1e-4)


def test_saves_among_stalls_and_the_first_of_two_steps_do_not_count(written):
    at = np.arange(1, 601)
    times = 3 * np.exp(0.005 * np.random.default_rng(3).standard_normal(600))
    times *= np.where(at % 8 == 0, 1.5, 1.0) * np.where(at % 100 == 0, 4.0, 1.0)
    log = written("train.log", _log(times))
    assert read_log(log).left_out == (LeftOut("periodic", 6),)
    log.write_text(_log([60.0, 3.0]))
    assert [run.tolist() for run in read_log(log).runs] == [[3.0]]


@pytest.mark.parametrize(
    "what", ["drift", "bursts", "stalls", "falling", "loader of 4", "loader of 10"]
)
def test_slow_steps_of_other_kinds_count(what, written):
    rng = np.random.default_rng(3)
    times = 3 * np.exp(0.005 * rng.standard_normal(400))
    at = np.arange(400)
    times *= {
        "drift": 1 + 0.2 * at / 400,
        "falling": 1.2 - 0.2 * at / 400,
        "bursts": np.where((at % 97 > 80) & (at > 97), 1.4, 1.0),
        "loader of 4": np.where(at % 4 == 3, 1.5, 1.0),
        "loader of 10": np.where(at % 10 == 9, 1.5, 1.0),
        "stalls": np.where((rng.random(400) < 0.06) & (at > 0), 1.5, 1.0),
    }[what]
    log = written("train.log", _log(times))
    measured = read_log(log)
    assert not measured.left_out
    np.testing.assert_allclose(measured.runs[0], times, atol=1e-4)


def test_a_restart_begins_another_run_and_other_ranks_are_not_counted_again(written):
    lines = [LINES["torchtitan"](i + 1, s) for i, s in enumerate(_TIMES[:20])]
    both = [text for line in lines for text in (line, line.replace("rank0", "rank1"))]
    again = [LINES["torchtitan"](i + 11, s) for i, s in enumerate(_TIMES[20:40])]
    log = written("train.log", [*both, *again])
    assert [*map(len, read_log(log, _JOB).runs)] == [20, 20]


def test_values_that_are_means_of_several_steps_give_a_level_alone(written):
    log = written(
        "train.log", (LINES["Megatron-LM"](10 * (i + 1), s) for i, s in enumerate(_TIMES))
    )
    measured = read_log(log)
    assert [*map(len, measured.runs)] == [1]
    assert "of 10 steps" in measured.notes[0]
    foundry = (
        f"[batch={i}/100]:\n\t Train loss: 11.7\n\t Train throughput/batches_per_sec: 0.5\n"
        for i in range(1, 30)
    )
    log.write_text("".join(foundry))
    assert [run.tolist() for run in read_log(log).runs] == [[2.0]]


def _bar(step, steps, rate, name=""):
    return f"{name}{100 * step // steps}%|#  | {step}/{steps} [03:08<28:15,  {rate}]{{'loss': 2.0}}"


def test_the_bar_of_training_is_read_and_in_both_of_its_units(tmp_path):
    log = tmp_path / "train.log"
    shards = [_bar(i, 40, "9.00s/it", "Loading checkpoint shards: ") for i in range(1, 41)]
    training = [_bar(i, 60, "1.02s/it" if i < 9 else "2.00it/s") for i in range(1, 61)]
    evaluation = [_bar(i, 33, "20.00it/s") for i in range(1, 34)]
    lines = [*shards, *training[:30], *evaluation, *training[30:], *evaluation]
    log.write_text("\r".join(lines))
    assert [run.tolist() for run in read_log(log).runs] == [[0.5]]
    log.write_text("{'train_runtime': '188.4', 'train_steps_per_second': '0.318', 'epoch': '1'}")
    assert [run.tolist() for run in read_log(log).runs] == [[pytest.approx(1 / 0.318)]]


def test_a_step_zero_is_a_step(written):
    log = written("train.log", (LINES["MaxText"](i, s) for i, s in enumerate(_TIMES)))
    np.testing.assert_allclose(read_log(log).runs[0], _TIMES, atol=1e-4)


def test_a_validation_is_no_step(tmp_path):
    log = tmp_path / "train.log"
    lines = [LINES["torchtitan"](10 * i, s) for i, s in enumerate(_TIMES)]
    lines.insert(9, "[rank0]:[titan] root - INFO - validate step: 85  loss:  5.0  tps: 99,999")
    log.write_text("\n".join(lines))
    measured = read_log(log, _JOB)
    assert [*map(len, measured.runs)] == [1]
    assert measured.left_out == (LeftOut("evaluation", 1),)


def test_a_loaded_checkpoint_begins_another_run(written):
    times = _TIMES.copy()
    times[30] = 40.0  # It compiles again, and goes on with the next step.
    loaded = " successfully loaded checkpoint from /data [ t 0, p 0 ] at iteration 30"
    log = written("train.log", _log(times, {31: loaded}))
    measured = read_log(log)
    assert [*map(len, measured.runs)] == [30, 29]
    assert measured.left_out == (LeftOut("start", 1),)


def test_a_line_that_is_still_written_is_not_read(tmp_path):
    log, table = tmp_path / "train.log", tmp_path / "metrics.jsonl"
    cut = LINES["Megatron-LM"](61, 3.1).partition("(ms): ")
    log.write_text(_log(_TIMES) + "\n" + "".join(cut[:2]) + "31")
    assert [*map(len, read_log(log).runs)] == [60]
    table.write_text(_tables(_TIMES)["metrics.jsonl"] + '\n{"step": 61, "tra')
    assert [*map(len, read_log(table).runs)] == [60]
    events = tmp_path / "events.out.tfevents.1"
    events.write_bytes(_events(_TIMES)[:-9])
    assert [*map(len, read_log(events).runs)] == [59]


def _csv(divider, write):
    lines = (f"{i + 1}{divider}{write(1e3 * s)}" for i, s in enumerate(_TIMES))
    return "\n".join([f"step{divider}dt_ms", *lines])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("thousands.csv", _csv(",", lambda ms: f'"{ms:,.1f}"')),
        ("german.csv", _csv(";", lambda ms: f"{ms:.1f}".replace(".", ","))),
        ("tabs.tsv", _csv("\t", lambda ms: f"{ms:.1f}")),
        ("table.txt", _csv(",", lambda ms: f"{ms:.1f}")),
        ("lines.txt", _tables(_TIMES)["metrics.jsonl"]),
        ("prefix.csv", _csv(",", lambda ms: f"{ms / 1e3:.4f}").replace("dt_ms", "a - train/dt")),
    ],
)
def test_a_table_is_found_by_its_content_and_its_numbers_as_they_are_written(
    name, content, written
):
    path = written(name, content)
    np.testing.assert_allclose(read_log(path).runs[0], _TIMES, atol=1e-4)


def test_the_mean_step_of_a_log_of_clocks_is_read(written):
    rows = [
        {
            "current_steps": 10 * i,
            "total_steps": 600,
            "elapsed_time": f"1 day, 0:{i // 2:02d}:{i % 2 * 30:02d}",
        }
        for i in range(1, 61)
    ]
    path = written("trainer_log.jsonl", map(json.dumps, rows))
    assert [run.tolist() for run in read_log(path).runs] == [[3.0]]


def test_a_unit_holds_or_is_refused(tmp_path):
    table, log = tmp_path / "steps.csv", tmp_path / "train.log"
    table.write_text("step_time_s\n" + "\n".join(f"{1e3 * s:.1f}" for s in _TIMES))
    np.testing.assert_allclose(read_log(table, unit="ms").runs[0], _TIMES, atol=1e-4)
    log.write_text(_log(_TIMES))
    refusal(lambda: read_log(log, unit="s"), "`--unit` is that of a table's column: drop it")


def test_ranks_that_write_in_turn_are_refused(written):
    lines = [LINES["MaxText"](i, s) for i, s in enumerate(_TIMES)]
    mixed = [line for i in range(0, 60, 2) for line in 2 * lines[i : i + 2]]
    log = written("train.log", mixed)
    refusal(lambda: read_log(log), "several ranks or runs have written it in turn; give")


@pytest.mark.parametrize(
    ("name", "seconds"),
    [
        ("c03_megatron.log", 2.5),
        ("c19_nanotron.log", 11.5),
        ("c19_torchtitan.log", None),
        ("c19_trainer_state.json", 3.14),
        ("c19_wandb_export.csv", 3.14),
        ("c19_tensorboard.csv", 3.14),
    ],
)
def test_cases_of_practitioners_are_read(shared, name, seconds):
    measured = read_log(shared / "cases" / name, _JOB)
    if seconds is not None:
        assert float(np.median(measured.runs[0])) == pytest.approx(seconds, rel=0.01)
    assert measured.used > 0


_LLAMA = ["llama-3-70b-h100-512"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "log", "options", "left_out"),
    [
        ([], "c03_megatron.log", [], [{"kind": "start", "count": 1}]),
        ([], "c19_torchtitan.log", ["--config", "c19_torchtitan.toml", "--gpus", "8"], []),
        ([], "c19_nanotron.log", ["--config", "c19_nanotron.yaml"], []),
        (_LLAMA, "c19_wandb_export.csv", [], []),
        (_LLAMA, "c19_trainer_state.json", [], []),
    ],
)
def test_a_log_has_a_verdict_by_one_command(shared, job, log, options, left_out, answered):
    cases = shared / "cases"
    options = [str(cases / word) if word.startswith("c19") else word for word in options]
    words = ["diagnose", *job, "--log", str(cases / log), *options, "--samples", "64", "--json"]
    found = answered(words)
    assert found["steps"]["left_out"] == left_out
    assert found["steps"]["used"] == found["num_steps"]
    low, high = found["interval_90"]
    assert low < found["predicted"] < high
    assert {"job", "causes", "changes"} <= found.keys()
    # Of invented steps; those that are within the interval are normal.
    assert found["normal"] == (2.5 <= found["percentile"] <= 97.5)


def _megatron(rates):
    """As `StragglerDetector.report` prints it, with `--straggler-minmax-count 3`."""
    order = sorted(range(16), key=lambda rank: rates[rank])
    low, high = order[0], order[-1]
    low3, high3 = ("".join(f" {rates[r]:.2f}/{r}," for r in x) for x in (order[:3], order[-3:]))
    return f"""0: INFO:[2026-03-14 23:07:56] | MnRtt/Rnk: 3453.08ms/8 | MxUtl/Rnk: 45.00%/20 | \
MnEtpt/Rnk: {rates[low]:.2f}TF/{low} | MxEtpt/Rnk: {rates[high]:.2f}TF/{high}
0: INFO:megatron.core.utils:^^^^ Bottom 3 Ranks with lowest  Etpt(TF):{low3}
0: INFO:megatron.core.utils:^^^^ Top    3 Ranks with highest Etpt(TF):{high3}
 iteration 10/ 100 | elapsed time per iteration (ms): 1234.0 |
"""


def _nvrx(rates):
    lines = [f"  Rank={r} Node=n{r // 8}:1 Score={rates[r] / max(rates):.2f}\n" for r in range(16)]
    text = "".join(lines)
    return f"GPU relative performance:\n{text}\nGPU individual performance:\n{lines[0]}"


def _nvrx_printed(rates):
    scores = {rank: round(rate / max(rates), 3) for rank, rate in enumerate(rates)}
    return f"GPU relative perf scores: {scores}\nGPU individual perf scores: {{0: 0.5}}\n"


def _flagscale(rates):
    lines = "".join(f"\n  rank {r} (host-{r // 8}): {rates[r] / 1e3:.6f}" for r in range(16))
    return f"=== Straggler Report at step 5 ===\n\nGPU scores (higher is faster):{lines}\n"


def _flagscale_saved(rates):
    scores = {str(rank): rate / 1e3 for rank, rate in enumerate(rates)}
    sections = {"forward": {str(rank): 1.0 for rank in range(16)}}
    return json.dumps({"step": 5, "section_scores": sections, "gpu_scores": scores}, indent=2)


@pytest.mark.parametrize("form", [_megatron, _nvrx, _nvrx_printed, _flagscale, _flagscale_saved])
def test_reports_of_stragglers_say_how_slow_ranks_are(form, tmp_path):
    """Two of sixteen ranks are slow in each report, and another one in one of three."""
    path, text = tmp_path / "job.log", "something else\n"
    for slow in ({3: 1.5, 7: 1.2}, {3: 1.5, 7: 1.2}, {3: 1.5, 7: 1.2, 11: 2.0}):
        text += form([300.0 / slow.get(rank, 1.0) for rank in range(16)])
    path.write_text(text if form is not _flagscale_saved else text.replace("something else\n", ""))
    found: Any = read_ranks(path, 16, 8)
    expected = [{3: 1.5, 7: 1.2}.get(rank, 1.0) for rank in range(16)]
    np.testing.assert_allclose(found.compute / np.median(found.compute), expected, rtol=0.01)
    assert found.collectives is None
    assert found.source.endswith("3 reports")
    refusal(lambda: read_ranks(path, 4, 4), "job.log: it has rank ... and the job has 4 ranks")
    with pytest.raises(
        ValueError, match=r"^[^:]*none\.log: there is no such file; give another\.$"
    ):
        read_ranks(tmp_path / "none.log", 4, 4)


def test_only_the_ends_of_a_fleet_are_named(written):
    """A rank without a figure counts as the slowest of the faster half of those with one."""
    path = written("job.log", "MnEtpt/Rnk: 200.00TF/5 | MxEtpt/Rnk: 300.00TF/2")
    compute: Any = read_ranks(path, 64, 8).compute
    assert compute[5] == pytest.approx(1.5)
    assert np.all(np.delete(compute, 5) == 1)


def test_tests_of_ranks_have_times_or_rates_of_products_and_collectives(written):
    path = written(
        "test.csv", "rank,GEMM_TFLOPS,busbw\n1,600,100\n0,700,200\n2,700,200\n3,700,200\n"
    )
    found = read_ranks(path, 4, 2)
    np.testing.assert_allclose(found.compute / found.compute[0], [1, 7 / 6, 1, 1])
    np.testing.assert_allclose(found.collectives / found.collectives[0], [1, 2, 1, 1])
    path.write_text("node,gemm_ms,all_reduce_ms\n0,1.0,3\n1,1.5,3\n")
    found = read_ranks(path, 4, 2)
    assert found.compute is not None
    assert found.each == 2
    np.testing.assert_allclose(found.compute, [1, 1, 1.5, 1.5])
    path.write_text("rank,busbw\n0,1\n1,1\n")
    assert read_ranks(path, 2, 1).compute is None
    path.write_text("rank,temperature\n0,1\n1,1\n")
    refusal(lambda: read_ranks(path, 2, 1), "the column `factor` is missing")


@pytest.mark.parametrize("nodes", [3, 5])
def test_factors_of_nodes_are_those_of_the_job(nodes, refused, written):
    path = written("nodes.csv", "node,factor\n" + "".join(f"{i},1.0\n" for i in range(nodes)))
    assert f"{nodes} rows by `node`, and the job has 32 GPUs in 4 nodes; give" in refused(
        ["diagnose", "examples/job.toml", "--ranks", str(path)]
    )


def test_only_a_log_says_what_its_job_is(refused):
    assert "Give the JOB that was measured" in refused(["diagnose", "--step-time", "2"])
