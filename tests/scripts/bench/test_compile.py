"""The benchmark of compiling; the kernels that it compiles need a Hopper GPU."""

import dataclasses

from jaxlora.bench import compile
from jaxlora.train.execute.step import CompiledSteps


def test_the_arguments_are_those_of_the_step():
    setup = compile.make_setup("tiny", 1)
    options = dataclasses.replace(
        setup.options, implementation="xla", attention="xla", max_segment_tokens=64
    )
    setup = dataclasses.replace(setup, options=options)
    arguments = compile.step_arguments(setup)
    traced = CompiledSteps(setup.spec()).accumulate.trace(*arguments)
    assert traced.out_info


def test_the_table_says_why_a_row_was_skipped():
    times = dict.fromkeys(compile._SECONDS, 1.5)
    rows = [
        {"cache": "empty", "model": "tiny", **times},
        {"cache": "empty", "model": "wide-2", "skipped": "no GPU"},
    ]
    assert compile.table(rows).splitlines()[2:] == [
        "| tiny | empty | 1.5 | 1.5 | 1.5 | 1.5 |",
        "| wide-2 | empty | skipped: no GPU |  |  |  |",
    ]
