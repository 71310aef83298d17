"""The same page in a notebook."""

from typing import Any

from .._files import resource
from .._installed import needed
from ._answers import answer, explored


# Questions and answers are messages with a number.
_ENTRY = """
export default { render({ model, el }) {
  const waiting = new Map();
  let number = 0;
  model.on("msg:custom", ({ number, answer }) => {
    waiting.get(number)?.(answer);
    waiting.delete(number);
  });
  explore(el, (question) => new Promise((resolve) => {
    waiting.set(++number, resolve);
    model.send({ number, question });
  }));
} };
"""


def explore(job: str, *overrides: str, num_samples: int = 4096, seed: int = 0) -> Any:
    """A widget for notebooks in which a job's layout, machine, software and spreads are moved, and
    the step, its parts, memory, cost and law follow. The page of `prism-jax explore` is the same.

    **Arguments:**

    - `job`, `overrides`: the name or path of a job with a model, and changes such as
        `"training.zero=3"`, as in `load_job`.
    - `num_samples`, `seed`: of the laws.

    **Returns:**

    An `anywidget.AnyWidget`, to be shown as the last line of a cell.

    **Raises:**

    `ImportError` of one sentence without the extra `explore`; `ValueError` as `load_job`, or if the
    job has no model.
    """
    anywidget = needed("anywidget")
    of = explored(job, overrides, num_samples=num_samples, seed=seed)
    script, css = resource("explorer/_explore.js") + _ENTRY, resource("explorer/_explore.css")
    widget = type("Explorer", (anywidget.AnyWidget,), {"_esm": script, "_css": css})()

    def reply(widget: Any, message: Any, buffers: Any) -> None:
        answered = answer(of, message.get("question"))
        widget.send({"number": message.get("number"), "answer": answered})

    widget.on_msg(reply)
    return widget
