"""The process that plans the groups of a sweep: settings come in, groups go out.

`jaxlora.sweeps.engine.group_plan` starts it, with the settings of a run as JSON. It
starts the devices first, so that all else is imported meanwhile.
"""

import dataclasses
import json
import logging
import os
import sys

from jaxlora.config import RunConfig
from jaxlora.device_check import start_backend
from jaxlora.errors import JaxloraError
from jaxlora.plan.memory.gpu_share import take_free_gpus


def main() -> None:
    """Reads a run from the standard input, and writes its groups to the output."""
    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s %(message)s", datefmt="%H:%M:%S"
    )
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to the log
    config = RunConfig.model_validate_json(sys.stdin.read())
    take_free_gpus(gathers=config.may_gather)
    start_backend()
    from jaxlora.forecast.group_plans import group_plans
    from jaxlora.train.compilation_cache import keep_compiled_programs

    keep_compiled_programs(will_compile=False)  # of estimates, a later start has use
    try:
        answer = dataclasses.asdict(group_plans(config))
    except JaxloraError as error:
        answer = {"error": str(error)}
    with out:
        out.write(json.dumps(answer))


if __name__ == "__main__":
    main()
