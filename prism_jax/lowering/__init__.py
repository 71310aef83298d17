from ._lay_out import (
    Frame as Frame,
    blocks_of_kinds as blocks_of_kinds,
    frame_of as frame_of,
    graph_of as graph_of,
    job_parts as job_parts,
    lay_out as lay_out,
    lower_chains as lower_chains,
    number_microbatches as number_microbatches,
)
from ._sinks import (
    Sink as Sink,
    cut_at_sinks as cut_at_sinks,
    sinks_of as sinks_of,
    when_reduced as when_reduced,
)
