"""`jaxlora generate`."""

import argparse
import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxlora.cli.options import (
    Command,
    add_device,
    add_revision,
    positive_int,
    use_device,
)
from jaxlora.common.console import complain
from jaxlora.errors import ConfigError, JaxloraError
from jaxlora.printable import KEPT_IN_TEXTS, one_line, printable

if TYPE_CHECKING:
    from jaxlora.config.generation_settings import GenerationSettings
    from jaxlora.generate.generator import Generator
    from jaxlora.generate.prompt import Generation, Prompt

_HELP = """\
/adapter NAME    goes on with another adapter, or with base
Ctrl-C stops an answer; Ctrl-D leaves."""
_SETTINGS = ("max_new_tokens", "temperature", "top_p", "top_k", "stop", "seed")


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="?", help="checkpoint folder or hub id; with --run, its base"
    )
    parser.add_argument(
        "--adapter",
        action="append",
        default=[],
        metavar="[NAME=]FOLDER",
        help="PEFT folder; repeatable. Each prompt is answered by every adapter",
    )
    parser.add_argument(
        "--run",
        dest="run_dir",
        metavar="RUN_DIR",
        help="use the latest weights of a run's jobs, which may be training",
    )
    parser.add_argument(
        "--job", action="append", help="with --run: only this job; repeatable"
    )
    _add_prompts(parser)
    _add_settings(parser)
    parser.add_argument("--batch-size", type=positive_int, default=16, metavar="N")
    parser.add_argument("--dtype", choices=("auto", "bfloat16", "float32"))
    # The table of formats, which checks the name, takes long to import.
    parser.add_argument("--quantize", metavar="FORMAT", help="such as fp8, int8 or nf4")
    add_revision(parser)
    add_device(parser)


def _add_prompts(parser: argparse.ArgumentParser) -> None:
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument(
        "--prompt", action="append", metavar="TEXT", help="prompt; repeatable"
    )
    asked.add_argument(
        "--prompts",
        metavar="FILE",
        help="text file of one prompt a line, or records with prompt or messages",
    )
    asked.add_argument(
        "-i", "--interactive", action="store_true", help="chat in the terminal"
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="send each prompt as a message, through the model's chat template",
    )
    parser.add_argument(
        "--chat-template",
        metavar="TEMPLATE",
        help="chat template in place of those of the adapters, which lie in their "
        "folders, and of the base: a file, a model's folder, chatml, llama3, or text",
    )
    parser.add_argument(
        "--chat-template-kwargs",
        metavar="{NAME: VALUE}",
        help="values of variables of the chat template, such as '{enable_thinking: "
        "false}'; default: those of each adapter's training",
    )
    parser.add_argument("--system", metavar="TEXT", help="system message of chats")
    parser.add_argument(
        "--output", metavar="FILE", help="also write the texts as .jsonl"
    )


def _add_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--max-new-tokens", type=int, metavar="N", help="default 128")
    parser.add_argument(
        "--temperature", type=float, metavar="T", help="default 0, which is greedy"
    )
    parser.add_argument("--top-p", type=float, metavar="P", help="default 1")
    parser.add_argument("--top-k", type=int, metavar="K", help="default 0, all tokens")
    parser.add_argument(
        "--stop", action="append", metavar="TEXT", help="ends a text; repeatable"
    )
    parser.add_argument("--seed", type=int, metavar="N", help="default 0")


def _run(arguments: argparse.Namespace) -> None:
    _check(arguments)
    _check_output(arguments)
    use_device(arguments)
    from jaxlora.generate.api import generation_settings
    from jaxlora.plan.memory.gpu_share import take_free_gpus
    from jaxlora.train.compilation_cache import keep_compiled_programs

    values = {name: getattr(arguments, name) for name in _SETTINGS}
    given = {name: value for name, value in values.items() if value is not None}
    settings, prompts = generation_settings(given), _prompts(arguments)
    take_free_gpus()
    keep_compiled_programs()
    generator = _generator(arguments)
    if arguments.interactive:
        _chat(generator, settings, arguments.system)
    else:
        _print_all(arguments, generator, prompts, settings)


def _check(arguments: argparse.Namespace) -> None:
    if arguments.model is None and arguments.run_dir is None:
        raise ConfigError("there is nothing to generate with: name a model, or --run.")
    if arguments.job and arguments.run_dir is None:
        raise ConfigError(f"--job {arguments.job[0]} needs --run, the folder of a run.")
    if arguments.run_dir is not None:
        for option in ("dtype", "quantize", "revision"):
            if getattr(arguments, option) is not None:
                raise ConfigError(
                    f"--{option} cannot be combined with --run, which takes it from "
                    "the run. Leave it out."
                )
    if arguments.chat_template is not None:
        from jaxlora.data.templates.known import find_template

        find_template(arguments.chat_template)
    _template_kwargs(arguments)
    is_chat = arguments.chat or arguments.interactive
    if arguments.system is not None and not is_chat:
        raise ConfigError("--system is a message of a chat: add --chat.")
    if arguments.prompts is None and not is_chat:  # a file may hold chats
        for option in ("chat-template", "chat-template-kwargs"):
            if getattr(arguments, option.replace("-", "_")) is not None:
                raise ConfigError(f"--{option} is for chats: add --chat.")
    if arguments.interactive and arguments.output is not None:
        raise ConfigError(
            "--output is for --prompt and --prompts, and has no effect on a chat in "
            "the terminal. Leave it out."
        )


def _template_kwargs(arguments: argparse.Namespace) -> dict[str, Any] | None:
    from jaxlora.common.yaml_file import parse_yaml
    from jaxlora.config.data_config import check_template_kwargs

    given, option = arguments.chat_template_kwargs, "--chat-template-kwargs"
    if given is None:
        return None
    values = parse_yaml(given, option)
    try:
        return check_template_kwargs(values)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from None


def _check_output(arguments: argparse.Namespace) -> None:
    from jaxlora.cli.outputs import check_output
    from jaxlora.generate.adapters import named_folders

    if arguments.output is None:
        return
    read = arguments.prompts, arguments.model, arguments.run_dir
    check_output(arguments.output, [*read, *named_folders(arguments.adapter).values()])


def _prompts(arguments: argparse.Namespace) -> "list[Prompt]":
    from jaxlora.generate.prompt import Prompt
    from jaxlora.generate.prompt_file import read_prompts

    if arguments.interactive:
        return []
    if arguments.prompts is not None:
        prompts = read_prompts(arguments.prompts, chat=arguments.chat)
    else:
        prompts = [Prompt(text) for text in arguments.prompt]
    if not arguments.chat:
        return prompts
    return [prompt.as_chat(arguments.system) for prompt in prompts]


def _generator(arguments: argparse.Namespace) -> "Generator":
    from jaxlora.generate.adapters import named_folders
    from jaxlora.generate.generator import Generator
    from jaxlora.hf.load import open_model
    from jaxlora.train.saved.run_adapters import load_run_adapters

    adapters: dict[str, Any] = named_folders(arguments.adapter)
    templates: Mapping[str, Any] = {}
    if arguments.run_dir is None:
        model = open_model(
            arguments.model,
            dtype=arguments.dtype or "auto",
            revision=arguments.revision,
            quantize=arguments.quantize,
        )
    else:
        run = load_run_adapters(arguments.run_dir, arguments.job, model=arguments.model)
        model, jobs, templates = run.model, run.adapters, run.templates
        for name in jobs.keys() & adapters.keys():
            raise ConfigError(
                f"the run has a job {name!r}, and {adapters[name]} has the same name. "
                f"Give the folder another one: --adapter NAME={adapters[name]}."
            )
        adapters = jobs | adapters
        for name, note in run.notes.items():
            complain(f"{name}: {note}")
    return Generator(
        model,
        adapters,
        batch_size=arguments.batch_size,
        chat_template=arguments.chat_template,
        chat_template_kwargs=_template_kwargs(arguments),
        templates=templates,
    )


def _chat(
    generator: "Generator", settings: "GenerationSettings", system: str | None
) -> None:
    """Answers line after line in the terminal, until the user leaves."""
    from jaxlora.common.job_name import BASE
    from jaxlora.generate.prompt import Message, Prompt

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - `input` uses it once it is imported
    messages: list[Message] = []
    if system is not None:
        messages = [{"role": "system", "content": system}]
    adapters = (BASE, *generator.adapters)
    adapter = adapters[min(1, len(adapters) - 1)]
    _write(f"{_HELP}\n")
    while True:
        try:
            line = input(f"\n[{one_line(adapter)}] > ").strip()
        except KeyboardInterrupt:  # It drops the line.
            _write("\n")
            continue
        except EOFError:
            _write("\n")
            return
        command, _, name = line.partition(" ")
        if command == "/adapter" and name.strip() in adapters:
            adapter = name.strip()
        elif command == "/adapter":
            _write(f"There is no adapter {name!r}; there are: {', '.join(adapters)}.\n")
        elif line:
            asked = [*messages, {"role": "user", "content": line}]
            try:
                answer = _answer(generator, Prompt(asked, adapter=adapter), settings)
            except JaxloraError as error:
                _write(f"jaxlora: error: {error}\n")
                continue
            messages = [*asked, {"role": "assistant", "content": answer}]


def _answer(
    generator: "Generator", prompt: "Prompt", settings: "GenerationSettings"
) -> str:
    """Prints an answer piece by piece. One that the user stops ends there."""
    pieces = []
    with contextlib.suppress(KeyboardInterrupt):
        for piece in generator.stream(prompt, settings):
            pieces.append(piece)
            _write(piece)
    _write("\n")
    return "".join(pieces)


def _write(text: str) -> None:
    print(printable(text, keep=KEPT_IN_TEXTS), end="", flush=True)


def _print_all(
    arguments: argparse.Namespace,
    generator: "Generator",
    prompts: "list[Prompt]",
    settings: "GenerationSettings",
) -> None:
    from jaxlora.generate.write import describe, write_generations

    made: list[Generation] = generator.generate(prompts, settings)
    is_only = len(made) == 1
    for generation in made:
        text = generation.text if is_only else describe(generation)
        print(printable(text, keep=KEPT_IN_TEXTS))
    if arguments.output is not None:
        write_generations(arguments.output, made)


COMMAND = Command(
    name="generate",
    text="Generate text with a model, with adapters, or with the latest weights of a "
    "run; several adapters answer in one batch. With --interactive, chat.",
    example="jaxlora generate --run runs/first --prompt 'Good morning'",
    add_arguments=_add_arguments,
    run=_run,
)
