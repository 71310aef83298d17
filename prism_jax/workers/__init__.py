from ._tasks import (
    RayExecutor as RayExecutor,
    prepare_worker as prepare_worker,
    run_tasks as run_tasks,
)
