"""What SECURITY.md says of the files of others; other tests that it names stand elsewhere."""

import json
import pathlib
import pickle
import re
import sys
import threading
from typing import Any

import numpy as np
import pytest

import prism_jax as prism
from prism_jax._files import read_archive, write_archive
from prism_jax.importers import import_job
from prism_jax.trace import read_rank_traces

from .helpers import refusal


_ROOT = pathlib.Path(__file__).parents[1]


class _Touches:
    """What makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return pathlib.Path.touch, (self.path,)


def test_no_file_runs_code(tmp_path):
    made, bad = tmp_path / "made", tmp_path / "bad"
    evil = pickle.dumps(_Touches(made))
    pickle.loads(evil)
    assert made.exists()
    made.unlink()
    # A pickle; an array of objects in an archive; and a class that is not of this package.
    program = prism.compile_graph([prism.Op(1.0, kind="gemm")])
    prism.save_program(program, tmp_path / "program.npz")
    with np.load(tmp_path / "program.npz") as archive:
        fields = dict(archive)
    about = json.loads(str(fields["about"]))
    about["program"] = {"class": "pathlib.Path", "fields": {}}
    objects = np.array([_Touches(made)], dtype=object)
    archives: list[Any] = [fields | {"array0": objects}]
    archives.append(fields | {"about": np.array(json.dumps(about))})
    for content in (evil, *archives):
        if isinstance(content, bytes):
            bad.write_bytes(content)
        else:
            with open(bad, "wb") as file:
                np.savez(file, **content)
        for load in (prism.load_program, prism.load_law):
            with pytest.raises(ValueError, match=r"is not a|not known here"):
                load(bad)
        assert not made.exists()
    # YAML and a shell script, of which only texts are read.
    for name, text in (
        ("a.yaml", f"MODEL_ARGS:\n  --num-layers: !!python/object/apply:os.mkdir [{made}]\n"),
        (
            "a.sh",
            f"python pretrain_gpt.py --num-layers $(touch {made}) --hidden-size `touch {made}`",
        ),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match=r"num-layers|YAML"):
            import_job(tmp_path / name, 8)
        assert not made.exists()


# Whether this thread only reads; and what it did beside. A hook of Python's cannot be removed.
_reader: list[int] = []
_did: list[str] = []
_WRITES = re.compile(
    r"os\.(system|exec|posix_spawn|spawn|fork|startfile|remove|rename|rmdir|mkdir|link|symlink"
    r"|truncate|chmod|chown|utime|putenv)|subprocess|socket\.|shutil\.|pickle\.|tempfile\.|pty\."
)


def _watch(event: str, arguments: tuple) -> None:
    if not _reader or threading.get_ident() != _reader[0]:
        return
    writes = event == "open" and re.search(r"[wax+]", str(arguments[1] or "r"))
    if writes or _WRITES.match(event):
        _did.append(f"{event} {arguments}")


def test_reading_only_reads(tmp_path, monkeypatch):
    examples = _ROOT / "examples"
    job = prism.load_job(examples / "trace_job.toml")
    program = prism.compile_graph([prism.Op(1.0, kind="gemm")])
    prism.save_program(program, tmp_path / "program.npz")
    monkeypatch.chdir(tmp_path)
    sys.addaudithook(_watch)

    def read():
        prism.load_job(examples / "job.toml")
        prism.load_cluster(examples / "cluster.toml", 4)
        prism.load_failures(examples / "failures.toml")
        prism.load_program(tmp_path / "program.npz")
        prism.read_trace(examples / "trace.csv", job)
        read_rank_traces(examples / "pytorch_profile", "kineto")
        import_job(examples / "config.json", 8)

    read()  # What is imported for it may write compiled Python.
    _reader.append(threading.get_ident())
    try:
        read()
        assert not _did
        (tmp_path / "written").write_text("seen")
    finally:
        _reader.clear()
    assert len(_did) == 1


def test_an_archive_that_unpacks_to_too_much_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "large.npz"
    write_archive(path, {}, {"zeros": np.zeros(2**17)})
    assert read_archive(path, dict, "law", "save_law")[1]["zeros"].shape == (2**17,)
    monkeypatch.setattr("prism_jax._files._MOST_BYTES", 2**19)
    assert path.stat().st_size < 2**14
    refusal(lambda: read_archive(path, dict, "law", "save_law"), "is not a law")


def test_the_tests_that_the_page_names_exist():
    page = (_ROOT / "SECURITY.md").read_text()
    named = re.findall(r"`(tests/\w+\.py)(?:::(\w+))?`", page)
    assert len(named) > 8
    for file, test in named:
        assert not test or f"def {test}(" in (_ROOT / file).read_text(), test
        assert (_ROOT / file).exists(), file
