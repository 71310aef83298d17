from ._job import (
    Imported as Imported,
    import_job as import_job,
)
from ._megatron import from_megatron as from_megatron
