"""Two thousand damaged inputs with fixed seeds: each is read, or refused in one sentence.

What a seed stands for is printed where it fails; no input gets as far as a simulation.
"""

import functools as ft
import json
import pathlib
import random
import re
import shutil

import numpy as np
import polars as pl
import pytest

import prism_jax as prism
from prism_jax import Variability, data, load_law, load_program, save_law, save_program
from prism_jax.cli import main
from prism_jax.data._variations import read_variations
from prism_jax.importers import import_job
from prism_jax.latency import Gamma
from prism_jax.law import Law
from prism_jax.profile import Profile, compile_profile, load_profile, save_profile
from prism_jax.profile._profile import Fitted, WorkerMean
from prism_jax.program import compile_job
from prism_jax.schedule import OneFOneB
from prism_jax.trace import read_factors, read_step_times, read_trace

from .helpers import by_hand, lognormal, made_law, pipeline_program


_ROOT = pathlib.Path(__file__).parents[1]
# The longest sentence beside the path that it names.
_MOST = 450

_WORDS = [
    *("-1", "0", "1", "3", "2.5", "nan", "inf", "-inf", "1e300", "-1e300", "1e-300", "1e29", "1e9"),
    *("9" * 468, "9" * 5000, "0x" + "f" * 6000, str(2**63), str(2**31), "1_000", "1e400", "-0.0"),
    *("true", "false", "[]", "{}", "[[]]", "{a=1}", "[1, 'x']", '""', "''", "'x'", "null", "None"),
    *("1979-05-27", "07:32:00", "[" * 2000, "{a=" * 300, "a." * 5000 + "a = 1", '"', "'", "'''"),
    *("=", ",", ";", ":", ".", "..", "/", "*", "?", "[x]", "~", "é", "\x00", "\x1b[31m", "\ufeff"),
    *("\u2028", "\r", "\n", "x" * 300, "x" * 200_000, " ", "\t", "gemm", "lognormal", "layout"),
    *("normal", "weibull", "two-regimes", "constant", "network", "stall", "rank", "dp", "tp", "pp"),
    *("name", "kind", "links", "cluster", "model", "dgx-a100", "forward-compute", "a\nb", "%s"),
]


def _mutate(content: bytes, rng: random.Random) -> bytes:
    """One to three mistakes: of a hand, of a disk, of a program."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        text = rng.random() < 0.8
        pieces = re.findall(rb"[\w.+-]+|\s+|[^\w\s]", content) if text else []
        lines = content.split(b"\n")
        at = rng.randrange(len(content) + 1)
        word = rng.choice(_WORDS).encode()
        match rng.randrange(7 if pieces else 3):
            case 0:
                content = content[:at]
            case 1:
                flipped = bytes([rng.randrange(256)])
                content = content[:at] + flipped + content[at + rng.randrange(2) :]
            case 2:
                end = min(len(content), at + rng.randrange(40))
                content = content[:at] + content[end:] + content[at:end] * rng.randrange(2)
            case 3 | 4:
                place = rng.randrange(len(pieces))
                while rng.random() < 0.9 and not pieces[place].strip(b" \n=,.'\"[]#"):
                    place = rng.randrange(len(pieces))
                pieces[place] = word
                content = b"".join(pieces)
            case 5:
                place = rng.randrange(len(lines))
                key = lines[place].split(b"=")[0]
                lines[place] = key + b"= " + word if b"=" in lines[place] else word
                content = b"\n".join(lines)
            case 6:
                one, other = rng.randrange(len(lines)), rng.randrange(len(lines))
                lines[one : one + rng.randrange(2)] = [lines[other]]
                content = b"\n".join(lines)
    return content


def _wrong_with(sentence: str, path: str = "") -> str:
    """What is wrong with what a user is told; of a path it may be long."""
    rest = sentence.replace(path, "") if path else sentence
    if not sentence.strip() or "\n" in sentence or not sentence.endswith((".", "`")):
        return "it is no sentence"
    if len(rest) > _MOST:
        return f"it has {len(rest)} characters"
    return "it is a traceback" if "Traceback" in sentence else ""


def _read(load, path: pathlib.Path, seed: object) -> None:
    """Either reads, or refuses in one sentence."""
    try:
        load(path)
    except ValueError as error:
        wrong = _wrong_with(str(error), str(path))
        if wrong:
            pytest.fail(f"{seed}: {wrong}: {str(error)[:1000]}")
    except BaseException as error:
        pytest.fail(f"{seed}: {type(error).__name__}: {str(error)[:1000]}")


def _fuzz(
    load, content: bytes, path: pathlib.Path, number: int, seed: str, more: tuple[int, ...] = ()
) -> None:
    for i in (*range(number), *more):
        path.write_bytes(_mutate(content, random.Random(f"{seed} {i}")))
        _read(load, path, (seed, i))


def _load_and_compile(path):
    """As far as a program, where its graph is small."""
    job = prism.load_job(path)
    blocks = job.layout.pp * job.schedule.virtual_stages * job.schedule.num_microbatches
    if blocks <= 64:
        compile_job(job)


@pytest.mark.parametrize("path", sorted(_ROOT.glob("jobs/*.toml")), ids=lambda path: path.stem)
def test_jobs(path, tmp_path):
    _fuzz(prism.load_job, path.read_bytes(), tmp_path / "job.toml", 60, path.stem)


_CONFIGURATION = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "head_dim": 16,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 999,
    "hidden_act": "silu",
}
_CONFIGURATIONS = {
    "aurora": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "nemotron_h": {"hybrid_override_pattern": "M*-E", "n_groups": 2, "mamba_num_heads": 4},
    "kimi_linear": {"linear_attn_config": {"kda_layers": [1, 2], "head_dim": 16, "num_heads": 4}},
    "gemma4": {"text_config": {"model_type": "gemma4_text", "per_layer_config": {"3": {}}}},
    "deepseek_v4": {"compress_ratios": [0, 4, 128, 4], "q_lora_rank": 8, "o_groups": 2},
    "qwen3": {"layer_types": ["full_attention"] * 4, "quantization_config": {"bits": 4}},
}


@pytest.mark.parametrize("kind", _CONFIGURATIONS)
def test_configurations(kind, tmp_path):
    content = json.dumps({"model_type": kind, **_CONFIGURATION, **_CONFIGURATIONS[kind]}).encode()
    load = ft.partial(import_job, num_gpus=8, batch=8)
    _fuzz(load, content, tmp_path / "config.json", 30, kind)


def test_configurations_of_adapters(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **_CONFIGURATION}))
    adapters = {"peft_type": "LORA", "r": 8, "lora_dropout": 0.1, "target_modules": ["q_proj"]}
    content = json.dumps(adapters | {"modules_to_save": None, "use_dora": False}).encode()
    path = tmp_path / "adapter_config.json"

    def load(path):
        import_job(tmp_path, 8, batch=8)

    _fuzz(load, content, path, 30, "adapters")


def test_jobs_to_programs(tmp_path):
    text = (_ROOT / "jobs/megatron-22b-a100-8.toml").read_bytes()
    for name, folder in (("model", "jobs/models"), ("cluster", "hardware/clusters")):
        # With its model and cluster in full.
        found = re.search(rb"%s = \"(.+)\"\n" % name.encode(), text)
        assert found
        part = (_ROOT / folder / f"{found[1].decode()}.toml").read_text()
        part = part.replace("[[links]]", "[[cluster.links]]").replace(f'kind = "{name}"\n', "")
        text = text.replace(found[0], b"") + f"\n[{name}]\n{part}".encode()
    (tmp_path / "whole.toml").write_bytes(text)
    _load_and_compile(tmp_path / "whole.toml")
    _fuzz(_load_and_compile, text, tmp_path / "job.toml", 120, "whole")


@pytest.mark.parametrize(
    ("folder", "load"),
    [
        ("jobs/models", prism.load_model),
        ("hardware/clusters", prism.load_cluster),
        ("hardware/devices", data.load_device),
    ],
)
def test_models_and_machines(folder, load, tmp_path):
    if load is prism.load_cluster:
        load = ft.partial(prism.load_cluster, num_nodes=9)
    for path in sorted((_ROOT / folder).glob("*.toml"))[::4]:
        _fuzz(load, path.read_bytes(), tmp_path / "part.toml", 30, path.stem)


def test_tables_of_laws(tmp_path):
    path = tmp_path / "variability.csv"
    for folder in ("h100-sxm", "dgx-h100"):
        content = (_ROOT / "kernels" / folder / "variability.csv").read_bytes()
        _fuzz(read_variations, content, path, 80, folder)


@pytest.fixture
def profile(tmp_path):
    means = [
        WorkerMean(kind, d, s, 0.1)
        for kind in ("forward-compute", "backward-compute", "forward-send", "backward-send")
        for d in range(2)
        for s in range(2)
    ]
    shutil.copy(_ROOT / "kernels/dgx-h100/variability.csv", tmp_path)
    laws = read_variations(tmp_path / "variability.csv")
    layout, schedule = prism.Layout(pp=2, dp=2), data.ScheduleConfig("1f1b", 2)
    found = Profile("mine", layout, schedule, data.Outline(), tuple(means), laws, Fitted(3))
    save_profile(found, tmp_path / "profile")
    return by_hand(tmp_path / "profile")


@pytest.mark.parametrize("name", ["profile.toml", "means.csv", "variability.csv"])
def test_profiles(name, profile):
    content = (profile / name).read_bytes()

    def load(path):
        found = load_profile(profile)
        if found.layout.dp * found.layout.pp * found.schedule.num_microbatches <= 64:
            compile_profile(found)

    _fuzz(load, content, profile / name, 50, name)


def _rewritten(path: pathlib.Path, fields: dict, rng: random.Random) -> None:
    """The archive with one of its arrays, or its description, changed as a sound file could be."""
    name = rng.choice([*fields])
    array = fields[name]
    if array.dtype.kind == "U":
        text = _mutate(str(array).encode(), rng).decode(errors="replace")
        changed = np.array(text.rstrip("\x00"))
    else:
        scale = rng.choice([-1.0, 0.0, 1e300, float("nan"), float("inf"), 2.0])
        with np.errstate(all="ignore"):
            changed = rng.choice(
                [
                    array[:-1] if array.ndim else array[None],
                    array[None],
                    array.astype(rng.choice(["f4", "f8", "i4", ">i8", "?", "c16", "U5"])),
                    np.where(np.arange(array.size).reshape(array.shape) % 7, array, scale),
                    array[::-1] if array.ndim else -array,
                ]
            )
    np.savez(path, **{**fields, name: changed})


@pytest.mark.parametrize("kind", ["law", "program"])
def test_archives(kind, tmp_path):
    path = tmp_path / "archive.npz"
    if kind == "law":
        load, content = load_law, made_law()
        save_law(content, path)
    else:
        laws = {"gemm": Gamma(1.0, 0.05), "send_recv": lognormal(0.1)}
        program = pipeline_program(
            OneFOneB(2, 2), variability=Variability(residual=laws), num_replicas=2
        )
        load = load_program
        save_program(program, path)
    whole = path.read_bytes()
    with np.load(path) as archive:
        fields = dict(archive)

    def use(path):
        found = load(path)
        if isinstance(found, Law):
            assert np.isfinite(np.asarray(found.quantile(np.linspace(0, 1, 5)))).all()
            assert repr(found)

    _fuzz(use, whole, path, 80, kind)
    for i in range(80):
        _rewritten(path, fields, random.Random(i))
        _read(use, path, (kind, "rewritten", i))


def _tables():
    """Each reader with a table that it reads."""
    rows = range(16)
    factors = pl.DataFrame({"gpu": [*rows], "factor": [1 + 0.01 * i for i in rows]})
    steps = {"run": [i // 8 for i in rows], "step": [*rows], "step_time_s": [1.5] * 16}
    trace = [
        (d, 0, step, kind, m, step + 0.1 * m, 0.05)
        for kind in ("forward-compute", "backward-compute")
        for d in range(2)
        for step in range(3)
        for m in range(2)
    ]
    names = ("dp_rank", "stage", "step", "optype", "seq_id", "start_ts", "duration")
    job = prism.Job(prism.Layout(dp=2), data.ScheduleConfig("1f1b", 2), name="traced")
    yield read_factors, factors
    yield read_step_times, pl.DataFrame(steps)
    yield lambda path: read_trace(path, job), pl.DataFrame(trace, schema=names, orient="row")


def test_tables_as_text(tmp_path):
    path = tmp_path / "table.csv"
    for number, (load, frame) in enumerate(_tables()):
        frame.write_csv(path)
        load(path)
        _fuzz(load, path.read_bytes(), path, 90, f"csv {number}")


def test_tables_with_columns_of_other_types(tmp_path):
    path = tmp_path / "table.parquet"
    values = ["host-1", "1", None, True, [1, 2], b"\xff", 1e300, float("nan"), -1]
    others = [*map(pl.lit, values), pl.lit(2**63, pl.UInt64), pl.lit("a", pl.Categorical)]
    others += [pl.lit(1, dtype) for dtype in (pl.Decimal(10, 2), pl.Int128, pl.Float32)]
    others += [pl.lit(0).cast(pl.Datetime), pl.lit(0).cast(pl.Duration), pl.struct(a=pl.lit(1))]
    for load, frame in _tables():
        frame.write_parquet(path)
        load(path)
        for name in frame.columns:
            for other in others:
                frame.with_columns(other.alias(name)).write_parquet(path)
                _read(load, path, (name, str(other)))


def test_damaged_parquet(tmp_path, capfd):
    path = tmp_path / "table.parquet"
    for number, (load, frame) in enumerate(_tables()):
        frame.write_parquet(path)
        # At two more, polars panics.
        _fuzz(load, path.read_bytes(), path, 150, f"parquet {number}", (1977, 2303))
    assert capfd.readouterr().err == ""  # Not even of the stack of another language.


_ARGUMENTS = [
    "simulate JOB --samples 10 --seed 3 --set layout.dp=1 --allocations 2 --sampling plain --json",
    "sensitivity JOB --objective p95 --samples 10 --top 3",
    "criticality JOB --of ops --band 0.94:0.96 --top 3",
    "timeline JOB --quantile 0.99 --out OUT.json --samples 10",
    "whatif JOB --slow-rank stage=0:1.2 --hot-node rank=0:1.1 --link nvlink:1.5 --kernel gemm:0.8",
    "whatif JOB --change schedule.num_microbatches=3 --link infiniband:2",
    "place JOB --factors FACTORS --samples 10 --out OUT.csv --objective over1.7",
    "improve JOB --cost gemm=3 --cost rank=2 --budget 2 --iterations 3",
    "target JOB --part rank --at 1.605 --objective cvar95",
    "sweep JOB --over kernels.gemm.sigma=0.01:0.2:3 --over layout.dp=1,2 --out OUT --samples 10",
    "fit TRACE --job JOB --steps 0:3 --out OUT",
    "calibrate JOB --to STEPS --out OUT.toml --seed 1",
    "score JOB --against STEPS --steps ::2 --samples 10",
    "jobs --json",
    "hardware",
    "kernels --variability",
    "simulate JOB --set training.microbatch_size=2 --set cluster.links.nvlink.group=8",
    "simulate JOB --set schedule.layers_per_stage=[48] --set kernels.network.probability=0.1",
    "simulate JOB --set cluster=dgx-a100 --set cluster.device=a100-80g-sxm --no-cache",
]


def test_command_lines(tmp_path, monkeypatch, capsys):
    from prism_jax import analysis, calibration, profile
    from prism_jax.cli import _load

    def reached(*_, **__):
        raise ValueError("All that was given is sound.")

    monkeypatch.setattr(_load, "compiled", reached)
    monkeypatch.setattr(analysis, "sweep_points", reached)
    monkeypatch.setattr(profile, "fit_profile", reached)
    monkeypatch.setattr(calibration, "calibrate", reached)
    monkeypatch.chdir(tmp_path)
    tables = dict(zip(("FACTORS", "STEPS", "TRACE"), (f for _, f in _tables()), strict=True))
    for name, frame in tables.items():
        frame.write_csv(tmp_path / f"{name}.csv")
    words = {name: f"{name}.csv" for name in tables}
    jobs = [str(_ROOT / "jobs/megatron-22b-a100-8.toml"), "megatron-22b-a100-8"]
    for i in range(600):
        rng = random.Random(i)
        line = _ARGUMENTS[i % len(_ARGUMENTS)].split()
        line = [words.get(word, rng.choice(jobs) if word == "JOB" else word) for word in line]
        for _ in range(rng.choice((1, 1, 2))):
            place = rng.randrange(len(line))
            given = rng.choice((*_WORDS, *line, ".", "/", "/dev/null", str(tmp_path), "*.toml"))
            match rng.randrange(4):
                case 0:
                    line[place] = given
                case 1:
                    pieces = re.split(r"([=:.,])", line[place])
                    pieces[rng.randrange(len(pieces))] = given
                    line[place] = "".join(pieces)
                case 2:
                    line.insert(place, given)
                case 3:
                    del line[place]
            line = line or [given]
        wrong = _wrong_with_command(line, capsys)
        if wrong:
            pytest.fail(f"{i} {[word[:100] for word in line]}: {wrong}")


def _wrong_with_command(line: list[str], capsys) -> str:
    try:
        status = main(line)
    except SystemExit:  # After `--help`.
        return capsys.readouterr().err
    except BaseException as error:
        return f"{type(error).__name__}: {str(error)[:1000]}"
    said = capsys.readouterr()
    if status == 0:
        return said.err
    # Points that a sweep leaves out are told before what ends it.
    lines = [line for line in said.err.split("\n") if not line.startswith("prism-jax: note: ")]
    told = "\n".join(lines).removeprefix("prism-jax: ").removesuffix("\n")
    wrong = said.out or _wrong_with(told)
    return f"{status}, {wrong}: {said.err[:1000]}" if wrong or status != 2 else ""
