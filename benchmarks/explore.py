"""How soon the page of `prism-jax explore` answers: ten moves by keyboard in Chromium.

    python benchmarks/explore.py [--job JOB] [--json]

Prints a row for each move: how long the step without variability takes to appear, and how long the
law, from the question to the answer, in seconds. The first row is the page as it opens. Compiled
code that is kept on the disk is used, as by the command.
"""

import json
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any


sys.path.insert(0, __file__.rpartition("/benchmarks/")[0])
from prism_jax.explorer import Server, explored, serve
from validation.tables import Row, options, table


# The label of a control, and the key that moves it.
MOVES = (
    ("layout.tp", "ARROW_RIGHT"),
    ("layout.tp", "ARROW_LEFT"),
    ("training.zero", "ARROW_LEFT"),
    ("training.microbatch_size", "ARROW_RIGHT"),
    ("cluster", "ARROW_DOWN"),
    ("training.software", "ARROW_DOWN"),
    ("spread of compute kernels", "ARROW_RIGHT"),
    ("spread of GPUs", "ARROW_RIGHT"),
    ("spread of steps", "ARROW_LEFT"),
    ("world_size", "ARROW_RIGHT"),
)
_PATIENCE = 60.0
_REFUSED = "return document.querySelector('.bad[role=status]')?.innerText"


def times_of_moves(
    browser: Any, address: str, moves: Any = MOVES, wait: bool = True
) -> Iterator[Row]:
    """Opens the page, then makes one move after the other: their rows. Without `wait`, the first
    move is made before the page has its first law.
    """
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    browser.get(address)
    if wait:
        yield {"move": "opened", "key": "", **_answered(browser, 1)}
    browser.implicitly_wait(_PATIENCE)
    for number, (name, key) in enumerate(moves, 2):
        label = browser.find_element(By.XPATH, f"//label[text()='{name}']")
        control = browser.find_element(By.ID, label.get_attribute("for"))
        control.send_keys(getattr(Keys, key))
        yield {"move": name, "key": key, **_answered(browser, number)}


def _answered(browser: Any, number: int) -> Row:
    """The seconds in which the page answered a move; without a law where it refused."""
    script = "const p = document.querySelector('.explore'); return {...p.dataset}"
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end:
        shown = {name: text.split() for name, text in browser.execute_script(script).items()}
        times = {name: float(ms) / 1e3 for name, (move, ms) in shown.items() if move == str(number)}
        refused = browser.execute_script(_REFUSED)
        if "step" in times and ("law" in times or refused):
            return {"step_s": times["step"], "law_s": times.get("law"), "refused": refused or ""}
        time.sleep(0.02)
    raise TimeoutError(f"The page did not answer move {number} in {_PATIENCE:g} s.")


def main() -> None:
    import prism_jax as prism
    from tests.chromium import chromium

    given = options(__doc__, job=("gpt3-175b-h100-4096", "the job"), json=(False, "print JSON"))
    prism.keep_compiled()
    server = Server(explored(given.job))
    threading.Thread(target=serve, args=(server,), daemon=True).start()
    with chromium() as browser:
        rows = list(times_of_moves(browser, server.address))
    if given.json:
        print(json.dumps({"job": given.job, "rows": rows}))
        return
    cells = [
        (row["move"], row["key"], f"{row['step_s']:.3f}", row["refused"] or f"{row['law_s']:.2f}")
        for row in rows
    ]
    print(table(("move", "key", "step (s)", "law (s)"), cells))


if __name__ == "__main__":
    main()
