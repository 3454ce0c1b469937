"""The commands, in the order in which `jaxlora --help` lists them."""

from jaxlora.cli import (
    bench,
    convert,
    data,
    export,
    generate,
    inspect,
    live,
    merge,
    migrate,
    plan,
    profile,
    status,
    sweep,
    train,
)

COMMANDS = (
    train.COMMAND,
    sweep.COMMAND,
    plan.COMMAND,
    data.COMMAND,
    status.COMMAND,
    live.ADD,
    live.CLONE,
    live.STOP,
    live.PAUSE,
    live.RESUME,
    generate.COMMAND,
    migrate.COMMAND,
    convert.COMMAND,
    merge.COMMAND,
    export.COMMAND,
    profile.COMMAND,
    bench.COMMAND,
    inspect.COMMAND,
)
