"""Interrupts commands at random moments, and kills sweeps and searches, which then go on.

`python benchmarks/interrupts.py [--number 300] [--kills 20] [--seed 0] [--json]`

After Ctrl-C a command exits with 130 and a sentence on stderr, within five seconds beyond a
compilation that has begun, and without a traceback. A sweep or a search for layouts that is killed
and started again has the same bytes, and a search prints the same table, as one that is not.
"""

import argparse
import json
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple


if __name__ == "__main__":
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])
from benchmarks._tables import table


_ROOT = pathlib.Path(__file__).resolve().parents[1]
_SIMULATED = ("gpt3-175b-h100-4096", "--samples", "300000")
_SWEEP = ("sweep", "megatron-22b-a100-8", "--samples", "20000")
_SWEEP += ("--over", "schedule.num_microbatches=4,8,16,32")
_LAYOUTS = ("layouts", "megatron-22b-a100-8", "--gpus", "64", "--batch", "64", "--top", "4")
_LAYOUTS += ("--budget", "10m")
_FIT = ("fit", "examples/trace.csv", "--job", "examples/trace_job.toml")
# Each with a folder for what it writes.
COMMANDS = {
    "simulate": lambda folder: ("simulate", *_SIMULATED),
    "sweep": lambda folder: (*_SWEEP, "--out", f"{folder}/sweep"),
    "layouts": lambda folder: (*_LAYOUTS, "--out", f"{folder}/layouts"),
    "fit": lambda folder: (*_FIT, "--out", f"{folder}/profile"),
    "report": lambda folder: ("report", *_SIMULATED, "--out", f"{folder}/report.html"),
}
# Those that go on where they were killed.
_GOES_ON = ("sweep", "layouts")
# Seconds: to the end of a command, to be given up, and from start to Ctrl-C at most.
_PATIENCE, _FOREVER, _LATEST = 5.0, 300.0, 20.0


class Trial(NamedTuple):
    """A command that was interrupted: after how many seconds, for how many it went on, its status,
    and what is wrong with it, if anything.
    """

    command: str
    after: float
    took: float
    status: int
    fault: str


def main() -> int:
    """Prints a table in Markdown, or JSON; the status is 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--number", type=int, default=300, help="how many interrupts")
    parser.add_argument("--kills", type=int, default=20, help="how many kills of each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=sorted(COMMANDS), action="append", help="these commands")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    # A shell has its background ignore Ctrl-C, and the commands would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    names = options.only or list(COMMANDS)
    with tempfile.TemporaryDirectory() as folder:
        trials = []
        for i in range(options.number):
            name = names[i % len(names)]
            trials.append(_interrupted(name, rng.uniform(0.1, _LATEST), folder))
            if trials[-1].fault:
                print(trials[-1], file=sys.stderr, flush=True)
        different = {name: _killed(name, options.kills, rng, folder) for name in _GOES_ON}
    if options.json:
        print(json.dumps({"trials": [one._asdict() for one in trials], "differ": different}))
    else:
        print(_table(trials), "", sep="\n")
        for name, number in different.items():
            print(f"{name}: {options.kills} were killed and started again; {number} differ.")
    return int(any(different.values()) or any(one.fault for one in trials))


def _table(trials: list[Trial]) -> str:
    cells = []
    for name in dict.fromkeys(one.command for one in trials):
        mine = [one for one in trials if one.command == name]
        ended = (sum(one.status == status for one in mine) for status in (130, 0))
        slowest, faults = max(one.took for one in mine), sum(bool(one.fault) for one in mine)
        cells.append((name, len(mine), *ended, f"{slowest:.1f}", faults))
    header = ("command", "interrupts", "exit 130", "ended before", "slowest s", "faults")
    return table(header, cells)


def _start(words: tuple[str, ...]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "prism_jax", *words]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=_ROOT)


def _interrupted(name: str, after: float, folder: str) -> Trial:
    command = _start(COMMANDS[name](folder))
    time.sleep(after)
    command.send_signal(signal.SIGINT)
    began, fault = time.monotonic(), ""
    try:
        _, error = command.communicate(timeout=_FOREVER)
    except subprocess.TimeoutExpired:
        command.kill()
        return Trial(name, after, _FOREVER, -9, "it did not end")
    took = time.monotonic() - began
    if command.returncode not in (0, 130):
        fault = f"exit status {command.returncode}: {error[-200:]}"
    elif command.returncode == 130 and "interrupted" not in error:
        fault = f"no sentence: {error[-200:]}"
    elif "Traceback" in error:
        fault = "a traceback"
    elif took > _PATIENCE and command.returncode == 130:
        fault = f"{took:.1f} s"
    elif command.returncode == 0 and took > 1:
        fault = "swallowed"
    _clean(folder)
    return Trial(name, after, took, command.returncode, fault)


def _killed(name: str, number: int, rng: random.Random, folder: str) -> int:
    """How many commands that are killed, and go on, print or keep something else than one that is
    not.
    """
    words, different = COMMANDS[name](folder), 0
    _clean(folder)
    began = time.monotonic()
    expected = _start(words).communicate()[0], _bytes(name, folder)
    seconds = time.monotonic() - began
    for _ in range(number):
        _clean(folder)
        command = _start(words)
        time.sleep(rng.uniform(1, seconds))
        command.kill()
        command.communicate()
        different += (_start(words).communicate()[0], _bytes(name, folder)) != expected
    return different


def _bytes(name: str, folder: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in pathlib.Path(folder, name).iterdir()}


def _clean(folder: str) -> None:
    for name in _GOES_ON:
        shutil.rmtree(pathlib.Path(folder, name), ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
