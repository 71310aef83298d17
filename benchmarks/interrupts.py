"""Interrupts commands at random moments, and kills sweeps and searches, which then go on.

`python benchmarks/interrupts.py [--number 300] [--kills 20] [--seed 0] [--json]`

After Ctrl-C a command exits with 130 and a sentence on stderr, within five seconds beyond a
compilation that has begun, and without a traceback. A sweep or a search for layouts that is killed
and started again has the same bytes, and a search prints the same table, as one that is not.
"""

import json
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from typing import Any


sys.path.insert(0, __file__.rpartition("/benchmarks/")[0])
from validation.rows import ROOT
from validation.tables import Row, by, options, table


COMMANDS = tomllib.loads(pathlib.Path(__file__).with_suffix(".toml").read_text())
# Those that go on where they were killed.
_GOES_ON = ("sweep", "layouts")
# Seconds: to the end of a command, to be given up, and from start to Ctrl-C at most.
_PATIENCE, _FOREVER, _LATEST = 5.0, 300.0, 20.0
_HEADER = ("command", "interrupts", "exit 130", "ended before", "slowest s", "faults")


def main() -> int:
    """Prints a table in Markdown, or JSON; the status is 1 if anything is wrong."""
    known = {"number": (300, "how many interrupts"), "kills": (20, "how many kills of each")}
    known |= {"seed": (0, "of all that is random"), "json": (False, "print JSON")}
    only = {"choices": sorted(COMMANDS), "action": "append", "help": "these commands"}
    given = options(__doc__, only=only, **known)
    rng = random.Random(given.seed)
    # A shell has its background ignore Ctrl-C, and the commands would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    names = given.only or list(COMMANDS)
    with tempfile.TemporaryDirectory() as folder:
        trials = []
        for i in range(given.number):
            name = names[i % len(names)]
            trials.append(_interrupted(name, rng.uniform(0.1, _LATEST), folder))
            if trials[-1]["fault"]:
                print(trials[-1], file=sys.stderr, flush=True)
        different = {name: _killed(name, given.kills, rng, folder) for name in _GOES_ON}
    if given.json:
        print(json.dumps({"trials": trials, "differ": different}))
    else:
        sums = (_sums(*one) for one in by("command", trials).items())
        print(table(_HEADER, sums), "", sep="\n")
        for name, number in different.items():
            print(f"{name}: {given.kills} were killed and started again; {number} differ.")
    return int(any(different.values()) or any(one["fault"] for one in trials))


def _sums(command: str, trials: list[Row]) -> tuple[Any, ...]:
    ended = (sum(one["status"] == status for one in trials) for status in (130, 0))
    slowest, faults = max(one["took"] for one in trials), sum(bool(one["fault"]) for one in trials)
    return command, len(trials), *ended, f"{slowest:.1f}", faults


def _start(name: str, folder: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "prism_jax", *COMMANDS[name].format(folder=folder).split()]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=ROOT)


def _interrupted(name: str, after: float, folder: str) -> Row:
    """A command that was interrupted: after how many seconds, for how many it went on, its status,
    and what is wrong with it, if anything.
    """
    command = _start(name, folder)
    time.sleep(after)
    command.send_signal(signal.SIGINT)
    began = time.monotonic()
    try:
        _, error = command.communicate(timeout=_FOREVER)
    except subprocess.TimeoutExpired:
        command.kill()
        return _trial(name, after, _FOREVER, -9, "it did not end")
    took = time.monotonic() - began
    status, end = command.returncode, error[-200:]
    faults = {f"exit status {status}: {end}": status not in (0, 130)}
    faults[f"no sentence: {end}"] = status == 130 and "interrupted" not in error
    faults["a traceback"] = "Traceback" in error
    faults[f"{took:.1f} s"] = took > _PATIENCE and status == 130
    faults["swallowed"] = status == 0 and took > 1
    _clean(folder)
    fault = next((text for text, is_so in faults.items() if is_so), "")
    return _trial(name, after, took, status, fault)


def _trial(*values: Any) -> Row:
    return dict(zip(("command", "after", "took", "status", "fault"), values, strict=True))


def _killed(name: str, number: int, rng: random.Random, folder: str) -> int:
    """How many commands that are killed, and go on, print or keep something else than one that is
    not.
    """
    different = 0
    _clean(folder)
    began = time.monotonic()
    expected = _start(name, folder).communicate()[0], _bytes(name, folder)
    seconds = time.monotonic() - began
    for _ in range(number):
        _clean(folder)
        command = _start(name, folder)
        time.sleep(rng.uniform(1, seconds))
        command.kill()
        command.communicate()
        different += (_start(name, folder).communicate()[0], _bytes(name, folder)) != expected
    return different


def _bytes(name: str, folder: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in pathlib.Path(folder, name).iterdir()}


def _clean(folder: str) -> None:
    shutil.rmtree(folder)
    pathlib.Path(folder).mkdir()


if __name__ == "__main__":
    sys.exit(main())
