"""A chat with a model in the terminal."""

import contextlib
import sys
from collections.abc import Callable

from jaxlora.common.job_name import BASE
from jaxlora.config.generation_settings import GenerationSettings
from jaxlora.errors import JaxloraError
from jaxlora.generate.generator import Generator
from jaxlora.generate.prompt import Message, Prompt
from jaxlora.printable import KEPT_IN_TEXTS, one_line, printable

_HELP = """\
/adapter NAME    goes on with another adapter, or with base
Ctrl-C stops an answer; Ctrl-D leaves."""


def _read(prompt: str) -> str:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - `input` uses it once it is imported
    return input(prompt)


def _print(text: str) -> None:
    sys.stdout.write(printable(text, keep=KEPT_IN_TEXTS))
    sys.stdout.flush()


def chat(
    generator: Generator,
    settings: GenerationSettings,
    *,
    system: str | None = None,
    read: Callable[[str], str] = _read,
    write: Callable[[str], None] = _print,
) -> list[Message]:
    """Answers line after line, until the user leaves; returns the conversation.

    Args:
        generator: Generates the answers.
        settings: How tokens are chosen.
        system: System message before the conversation.
        read: Given the text to show before it, returns the user's next line. It raises
            EOFError to leave, and KeyboardInterrupt to drop a line.
        write: Prints a piece of text at once.
    """
    messages: list[Message] = []
    if system is not None:
        messages = [{"role": "system", "content": system}]
    adapters = (BASE, *generator.adapters)
    adapter = adapters[min(1, len(adapters) - 1)]
    write(f"{_HELP}\n")
    while True:
        try:
            line = read(f"\n[{one_line(adapter)}] > ").strip()
        except KeyboardInterrupt:
            write("\n")
            continue
        except EOFError:
            write("\n")
            return messages
        command, _, name = line.partition(" ")
        if command == "/adapter" and name.strip() in adapters:
            adapter = name.strip()
        elif command == "/adapter":
            write(f"There is no adapter {name!r}; there are: {', '.join(adapters)}.\n")
        elif line:
            asked = [*messages, {"role": "user", "content": line}]
            pieces: list[str] = []
            try:
                # An answer that is stopped stays in the conversation.
                with contextlib.suppress(KeyboardInterrupt):
                    prompt = Prompt(asked, adapter=adapter)
                    for piece in generator.stream(prompt, settings):
                        pieces.append(piece)
                        write(piece)
            except JaxloraError as error:
                write(f"jaxlora: error: {error}\n")
                continue
            write("\n")
            answer = {"role": "assistant", "content": "".join(pieces)}
            messages = [*asked, answer]
