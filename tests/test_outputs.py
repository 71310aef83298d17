"""What is there stays: no command replaces a file unasked, what it reads, or part of a profile."""

import contextlib
import errno
import itertools as it
import os
import shutil
import types

import numpy as np
import pytest

import prism_jax as prism
from prism_jax.cli import main
from prism_jax.cli._main import COMMANDS, make_parser, options_of
from prism_jax.data import Layout, Outline, ScheduleConfig, Variation
from prism_jax.measure import FILES as MACHINE
from prism_jax.profile import FILES as PROFILE
from prism_jax.profile._profile import Fitted, PositionFactor, WorkerMean

from .helpers import by_hand, refusal


_JOB = "megatron-22b-a100-8"
# Each command that writes a file, and the files that it would replace.
_WRITES = {
    f"simulate {_JOB} --out OUT.npz": [""],
    f"timeline {_JOB} --out OUT.json": [""],
    f"report {_JOB} --out OUT.html": [""],
    f"place {_JOB} --out OUT.csv": [""],
    f"calibrate {_JOB} --to STEPS --out OUT.toml": [""],
    "import CONFIG --gpus 8 --out OUT.toml": [""],
    "init OUT.toml": [""],
    f"trace TRACE --job {_JOB} --ops OUT.parquet": [""],
    f"fit TRACE --job {_JOB} --out OUT": PROFILE,
    "measure --out OUT": MACHINE,
    "fit-kernels TABLE --device mine --out OUT": ("shapes.csv", "source.toml"),
}
# To these, rows are added; what is no row of the same sweep or search is refused.
_ADDS = {"sweep", "layouts"}


def test_all_commands_that_write_are_checked():
    commands = {line.split()[0] for line in _WRITES} | _ADDS
    for name in COMMANDS:
        options = options_of(make_parser([name])[1][name])
        assert ("--out" in options or "--ops" in options or name == "init") == (name in commands)
        assert ("--force" in options) == (name in commands - _ADDS)


@pytest.mark.parametrize(("line", "names"), _WRITES.items(), ids=lambda line: str(line).split()[0])
def test_no_command_replaces_a_file_unasked(line, names, tmp_path, monkeypatch, refused):
    make_parser()  # Imports all commands, so that none keeps a function that is replaced here.
    for function in (
        "cli._load.load",
        "data.load_job",
        "importers.import_job",
        "trace.read_rank_traces",
    ):
        monkeypatch.setattr(f"prism_jax.{function}", lambda *_: pytest.fail("something was read"))
    words = [word.replace("OUT", str(tmp_path / "out")) for word in line.split()]
    (out,) = (word for word in words if word.startswith(str(tmp_path)))
    for name in names:
        path = tmp_path / "out" / name if name else tmp_path / os.path.basename(out)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
        said = refused(words)
        assert "is there already" in said
        assert "`--force` to overwrite it" in said
        assert path.read_text() == "mine"
        path.unlink()


@pytest.mark.parametrize("name", ["the same", "a symbolic link", "a hard link"])
def test_no_command_replaces_what_it_reads(name, tmp_path, refused):
    table, out = tmp_path / "factors.csv", tmp_path / "out.csv"
    table.write_text("node,factor\n0,1\n")
    if name == "the same":
        out = table
    else:
        (os.symlink if name == "a symbolic link" else os.link)(table, out)
    assert "is read by this command, too" in refused(
        ["place", _JOB, "--factors", str(table), "--out", str(out), "--force"]
    )
    assert table.read_text() == "node,factor\n0,1\n"


def test_neither_a_job_nor_a_part_of_it_is_replaced(tmp_path, refused):
    job, steps, model = (tmp_path / name for name in ("job.toml", "steps.csv", "model.toml"))
    for path in (job, steps, model):
        path.write_text("read")
    folder, own = tmp_path / "profile", tmp_path / "own.toml"
    own.write_text('cluster = "model.toml"\n')
    prism.save_profile(_profile(1.0), folder)
    for words in (
        ["calibrate", own, "--to", steps, "--out", model],
        ["calibrate", job, "--to", steps, "--out", job],
        ["calibrate", _JOB, "--set", f"model={model}", "--to", steps, "--out", model],
        ["import", job, "--gpus", "8", "--out", job],
        ["fit", folder / "means.csv", "--job", job, "--out", folder],
        ["place", folder, "--out", folder / "means.csv"],
    ):
        assert "is read by this command, too" in refused([*words, "--force"])


def test_a_job_that_cannot_be_read_is_one_sentence_where_a_command_writes(tmp_path, refused):
    job, steps = tmp_path / "job.toml", tmp_path / "steps.csv"
    steps.write_text("step,step_time_s\n0,1.0\n")
    for text in ("a = " + "[" * 100_000, "a =", "\x00", ""):
        job.write_text(text)
        words = ["calibrate", job, "--to", steps, "--out", tmp_path / "out.toml"]
        refused(words)


def test_a_file_is_replaced_only_by_a_whole_one(tmp_path, monkeypatch, capsys, written):
    def half(path):
        with open(path, "w") as file:
            file.write("half")
        raise OSError(errno.ENOSPC, "No space left on device")

    placed = types.SimpleNamespace(
        num_samples=1, table=lambda: types.SimpleNamespace(write_csv=half)
    )
    program = types.SimpleNamespace(world_size=8, variability=types.SimpleNamespace(rank=None))
    monkeypatch.setattr("prism_jax.placement.place", lambda *_, **__: placed)
    monkeypatch.setattr("prism_jax.cli._load.compiled", lambda *_: (program, _options()))
    (tmp_path / "factors.csv").write_text("factor\n" + "1\n" * 8)
    out = written("out.csv", "of before")
    words = ["place", _JOB, "--factors", str(tmp_path / "factors.csv"), "--out", str(out)]
    assert main([*words, "--force"]) == 1
    assert "No space left" in capsys.readouterr().err
    assert out.read_text() == "of before"
    assert len([*tmp_path.iterdir()]) == 2


def _options():
    import jax

    return {"key": jax.random.key(0)}


def _profile(mean_s, *, optional=True):
    means = [WorkerMean(f"{kind}-compute", 0, 0, mean_s) for kind in ("forward", "backward")]
    laws = tuple(
        Variation(mean.kind, "residual", "lognormal", {"sigma": 0.1 * mean_s}, "x")
        for mean in means
    )
    of_job = ("p", Layout(), ScheduleConfig("1f1b", 2), Outline())
    positions = (PositionFactor("forward-compute", 0, 0, mean_s),)
    more = {"sets": ((mean_s, 1.0),), "positions": positions} if optional else {}
    return prism.Profile(*of_job, tuple(means), laws, Fitted(3, level=mean_s), **more)


def test_a_profile_is_whole_or_none(tmp_path):
    """Of files of two profiles, only those of one are taken together."""
    one, other, mixed = tmp_path / "one", tmp_path / "other", tmp_path / "mixed"
    for folder, mean_s in ((one, 1.0), (other, 3.0)):
        prism.save_profile(_profile(mean_s), folder)
        assert sorted(file.name for file in folder.iterdir()) == sorted(PROFILE)
    for from_one in it.product([False, True], repeat=len(PROFILE)):
        mixed.mkdir()
        for name, of_one in zip(PROFILE, from_one, strict=True):
            shutil.copy((one if of_one else other) / name, mixed)
        if len({*from_one}) == 1:
            assert prism.load_profile(mixed) == _profile(1.0 if from_one[0] else 3.0)
        else:
            message = refusal(lambda: prism.load_profile(mixed), "were not written together")
            assert message.count(". ") == 0
        shutil.rmtree(mixed)
    # One of fewer files takes none of the others.
    prism.save_profile(_profile(2.0, optional=False), one)
    assert prism.load_profile(one) == _profile(2.0, optional=False)
    shutil.copy(other / "microbatches.csv", one)
    refusal(lambda: prism.load_profile(one), "were not written together")


@pytest.mark.parametrize("many", range(5))
def test_a_profile_that_a_full_disk_cut_is_none(many, tmp_path, monkeypatch):
    from prism_jax.data import _read

    prism.save_profile(_profile(1.0), tmp_path)
    written, left = _read.written_whole, iter(range(many))

    def until_full(path):
        if next(left, None) is None:
            raise OSError(errno.ENOSPC, "No space left on device")
        return written(path)

    monkeypatch.setattr(_read, "written_whole", until_full)
    refusal(lambda: prism.save_profile(_profile(3.0), tmp_path), "No space", OSError)
    refusal(lambda: prism.load_profile(tmp_path), "there is no `profile.toml` in it")


def test_every_flipped_bit_of_a_profile_is_noticed(tmp_path):
    profile = _profile(1.0)
    prism.save_profile(profile, tmp_path)
    rng = np.random.default_rng(0)
    for path in tmp_path.iterdir():
        whole = path.read_bytes()
        for bit in rng.integers(8 * len(whole), size=12).tolist():
            damaged = bytearray(whole)
            damaged[bit // 8] ^= 1 << bit % 8
            path.write_bytes(damaged)
            with contextlib.suppress(ValueError):
                assert prism.load_profile(tmp_path) == profile
        path.write_bytes(whole)


def test_a_profile_takes_no_folder_that_has_such_files_of_others(tmp_path, written):
    for name in ("means.csv", "microbatches.csv", "profile.toml"):
        written(name, "kind = 'other'")
        with pytest.raises(ValueError, match=f"it has a `{name}` that is of no profile"):
            prism.save_profile(_profile(1.0, optional=False), tmp_path)
        assert [file.name for file in tmp_path.iterdir()] == [name]
        prism.save_profile(_profile(1.0, optional=False), tmp_path, overwrite=True)
        assert prism.load_profile(tmp_path) == _profile(1.0, optional=False)
        for file in tmp_path.iterdir():
            file.unlink()


def test_a_profile_written_by_hand_needs_no_digest(tmp_path):
    prism.save_profile(_profile(1.0), tmp_path)
    path = by_hand(tmp_path) / "means.csv"
    path.write_text(path.read_text().replace("1.0,1.0", "2.0,1.0"))
    assert {mean.mean_s for mean in prism.load_profile(tmp_path).means} == {2.0}
