"""A live page of a job: `explore`."""

import json
import pathlib
import tempfile
import webbrowser

import prism_jax as prism

from .._progress import said_how_far
from . import _load
from ._options import Args, Output, command
from ._values import reader


_port = reader(int, lambda port: 0 <= port < 2**16, "the number of a port from 0 to 65,535")


@command(
    "--seed --set --gpus --allow-implausible --device",
    how={"--port": _port},
)
def explore(args: Args) -> Output:
    """Serve a page on which a job is moved, and its step, parts, memory, cost and law follow.

    job JOB  a shipped job (`prism-jax jobs`), or a .toml file, with a model
    --samples N (4096)  steps of each law
    --port PORT (0)  the port of 127.0.0.1; 0 is any free one
    --open  also open the page in a browser

    example: prism-jax explore examples/job.toml --open
    """
    _load.use_devices(args, lambda: prism.program.compile_job(_load.load(args)))
    explorer = prism.explorer
    of = explorer.explored(
        args.job, tuple(args.overrides), num_samples=args.samples, seed=args.seed
    )
    try:
        server = explorer.Server(of, args.port)
    except OSError as error:
        raise ValueError(
            f"Port {args.port} of 127.0.0.1 cannot be used ({error.strerror}); give another "
            "`--port`, or none."
        ) from None
    text = f"{server.address}\nOnly this machine can open it. Ctrl-C ends it."
    print(json.dumps({"address": server.address}) if args.json else text, flush=True)
    with tempfile.TemporaryDirectory() as folder:  # For nobody else to read.
        if args.open:
            # The words of a browser can be read by others on this machine, so it gets a file.
            page = pathlib.Path(folder, "explore.html")
            page.write_text(f'<meta http-equiv="refresh" content="0; url={server.address}">')
            if not webbrowser.open(page.as_uri()):
                _load.tell_note("No browser could be opened; open the address above in one.")
        try:
            with said_how_far(None, False):  # A server has no end to report on.
                explorer.serve(server)
        except KeyboardInterrupt:
            raise KeyboardInterrupt("interrupted; the page is closed.") from None
    return Output()
