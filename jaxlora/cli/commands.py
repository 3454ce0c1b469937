"""The commands, in the order in which `jaxlora --help` lists them."""

from jaxlora.cli import (
    data,
    files,
    generate,
    inspect,
    live,
    plan,
    profile,
    serve,
    train,
)

COMMANDS = (
    *(train.TRAIN, train.SWEEP, plan.COMMAND, data.COMMAND, inspect.STATUS),
    *(live.ADD, live.CLONE, live.STOP, live.PAUSE, live.RESUME, generate.COMMAND),
    *(serve.SERVE, serve.KEYS),
    *(files.MIGRATE, files.CONVERT, files.MERGE, files.EXPORT),
    *(profile.COMMAND, inspect.INSPECT),
)
