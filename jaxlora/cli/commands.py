"""The commands, in the order in which `jaxlora --help` lists them."""

from jaxlora.cli import (
    bench,
    convert,
    export,
    generate,
    inspect,
    merge,
    migrate,
    plan,
    train,
)

COMMANDS = (
    train.COMMAND,
    plan.COMMAND,
    generate.COMMAND,
    migrate.COMMAND,
    convert.COMMAND,
    merge.COMMAND,
    export.COMMAND,
    bench.COMMAND,
    inspect.COMMAND,
)
