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
/reset           forgets the conversation
/adapter NAME    goes on with another adapter, or with base
/help            prints this
Ctrl-C stops an answer; Ctrl-D leaves."""


class Chat:
    """A conversation, one line of the user at a time.

    Attributes:
        messages: The conversation so far.
        adapter: Name of the adapter that answers.
    """

    def __init__(
        self,
        generator: Generator,
        settings: GenerationSettings,
        *,
        system: str | None = None,
        write: Callable[[str], None] | None = None,
    ):
        """Starts a conversation.

        Args:
            generator: Generates the answers.
            settings: How tokens are chosen.
            system: System message before the conversation.
            write: Prints a piece of text at once; None: on standard output.
        """
        self._generator, self._settings = generator, settings
        self._system, self._write = system, write or _print
        self.adapter = next(iter(generator.adapters), BASE)
        self.messages: list[Message] = []
        self._reset()

    def _reset(self) -> None:
        system = [{"role": "system", "content": self._system}]
        self.messages = [] if self._system is None else list(system)

    def run(self, read: Callable[[str], str]) -> None:
        """Answers line after line, until the user leaves.

        Args:
            read: Given the text to show before it, returns the user's next line. It
                raises EOFError to leave, and KeyboardInterrupt to drop a line.
        """
        self._write(f"{_HELP}\n")
        while True:
            try:
                line = read(f"\n[{one_line(self.adapter)}] > ").strip()
            except EOFError:
                self._write("\n")
                return
            except KeyboardInterrupt:
                self._write("\n")
                continue
            try:
                self.take(line)
            except JaxloraError as error:
                self._write(f"jaxlora: error: {error}\n")

    def take(self, line: str) -> None:
        """Follows a command, or answers a message."""
        command, _, argument = line.partition(" ")
        if command == "/reset":
            self._reset()
        elif command == "/adapter":
            self._choose(argument.strip())
        elif line.startswith("/"):
            self._write(f"{_HELP}\n")
        elif line:
            self._answer(line)

    def _choose(self, name: str) -> None:
        if name not in (BASE, *self._generator.adapters):
            names = ", ".join((BASE, *self._generator.adapters))
            self._write(f"There is no adapter {name!r}; there are: {names}.\n")
            return
        self.adapter = name

    def _answer(self, line: str) -> None:
        """Answers a message; an answer that is stopped stays in the conversation."""
        asked = [*self.messages, {"role": "user", "content": line}]
        pieces: list[str] = []
        prompt = Prompt(asked, adapter=self.adapter)
        stream = self._generator.stream(prompt, self._settings)
        with contextlib.suppress(KeyboardInterrupt):
            for piece in stream:
                pieces.append(piece)
                self._write(piece)
        self._write("\n")
        answer = {"role": "assistant", "content": "".join(pieces)}
        self.messages = [*asked, answer]


def read_line(prompt: str) -> str:
    """Reads a line from the terminal, with editing and history where there are any."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - `input` uses it once it is imported
    return input(prompt)


def _print(text: str) -> None:
    sys.stdout.write(printable(text, keep=KEPT_IN_TEXTS))
    sys.stdout.flush()
