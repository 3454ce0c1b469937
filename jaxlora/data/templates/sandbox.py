"""Jinja templates in a sandbox, and marks that show which message printed which text.

This runs in the process that `template_worker` starts, which limits its time and
memory. It must import nothing heavy.
"""

import dataclasses
import datetime
import functools
import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import meta, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.visitor import NodeTransformer

from jaxlora.data.templates.call_arguments import tests_of_none, without_absent
from jaxlora.data.templates.inner_values import check_printed, unprintable

Span = tuple[int, int]


class _Generation(jinja2.ext.Extension):
    """Parses `{% generation %}...{% endgeneration %}` and renders its body."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        sandbox = self.environment
        assert isinstance(sandbox, _Sandbox)
        sandbox.has_generation = True
        if sandbox.marks is not None:
            body = [_call("_generation_begins"), *body, _call("_generation_ends")]
        return nodes.Scope(body).set_lineno(line)


class _Sandbox(ImmutableSandboxedEnvironment):
    """An immutable sandbox that raises on access to unsafe attributes.

    Attributes:
        marks: Functions that print marks, or None for plain text.
        has_generation: Whether a template with `{% generation %}` was parsed.
    """

    def __init__(self, marks: "_Marks | None" = None, **options):
        super().__init__(extensions=[_Generation, jinja2.ext.loopcontrols], **options)
        self.marks = marks
        self.has_generation = False
        self.filters["tojson"] = _to_json
        self.tests.update(tests_of_none(self.tests))

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        # Jinja's default is a value that prints as "" and raises only on later use.
        raise SecurityError(
            f"access to {attribute!r} of a {type(obj).__name__} is not allowed"
        )


class RecordTemplate:
    """A template over a record's fields; unknown and null fields raise.

    So do lists and objects that are printed, whose text would be Python's notation.

    Attributes:
        names: Fields that the template may use.
    """

    def __init__(self, source: str, start_clock: Callable[[], None]):
        """Compiles the template.

        Args:
            source: The template.
            start_clock: Called before each rendering.

        Raises:
            jinja2.TemplateSyntaxError: It does not parse.
        """
        sandbox = _Sandbox(
            undefined=jinja2.StrictUndefined,
            keep_trailing_newline=True,
            finalize=_printed,
        )
        self.names = meta.find_undeclared_variables(sandbox.parse(source))
        self._template = sandbox.from_string(source)
        self._start_clock = start_clock

    def render(self, values: Mapping[str, Any]) -> str:
        """The text; whatever goes wrong is an exception of any type."""
        self._start_clock()
        fields = {name: unprintable(name, value) for name, value in values.items()}
        return self._template.render(fields)


@dataclasses.dataclass(frozen=True, slots=True)
class Trace:
    """Records which message printed which characters of a text.

    Attributes:
        turns: Spans that each message printed, by the message's index: one for each
            iteration of a loop over messages that printed anything.
        generations: Spans of `{% generation %}` blocks, each with the index of the
            message that it belongs to, or None.
        tail_start: First character after the last loop over messages.
    """

    turns: Mapping[int, Sequence[Span]]
    generations: Sequence[tuple[int, int, int | None]]
    tail_start: int


class ChatTemplate:
    """A tokenizer's chat template, with the functions that transformers gives to it.

    Attributes:
        source: The template.
        literals: The texts that it may print by itself, and what it tells the time.
        names: Variables that the template may use.
        has_generation: Whether it has `{% generation %}` blocks.
        prompts: Generation prompts that were found, for `turns`.
    """

    def __init__(
        self, source: str, now: datetime.datetime, start_clock: Callable[[], None]
    ):
        """Compiles the template.

        Args:
            source: The template.
            now: The time that `strftime_now` formats.
            start_clock: Called before each rendering.

        Raises:
            jinja2.TemplateSyntaxError: It does not parse.
        """
        sandbox = _chat_sandbox(None)
        self.source = source
        self._functions = {
            "raise_exception": _raise_exception,
            "strftime_now": now.strftime,
        }
        self._start_clock = start_clock
        tree = sandbox.parse(source)
        self.names = meta.find_undeclared_variables(tree)
        texts = [node.value for node in tree.find_all(nodes.Const)]
        texts += [node.data for node in tree.find_all(nodes.TemplateData)]
        texts += [now.strftime("%A %d %B %Y %b %m/%d/%y %H:%M:%S %Y-%m-%d")]
        self.literals = "\0".join(text for text in texts if isinstance(text, str))
        self.has_generation = sandbox.has_generation
        self._template = sandbox.from_string(tree, globals=dict(self._functions))
        self.prompts: dict[str, str] = {}
        self._marks: _Marks | None = None
        self._marked: jinja2.Template | None = None

    @functools.cache  # noqa: B019 - templates are few
    def mentions(self, key: str) -> bool:
        """Whether the template mentions a key of messages, as a complete word."""
        return re.search(rf"\b{key}\b", self.source) is not None

    def render(self, values: Mapping[str, Any]) -> str:
        """The text; whatever goes wrong is an exception of any type."""
        self._start_clock()
        return self._template.render(values)

    def trace(
        self, values: Mapping[str, Any], text: str, *, with_turns: bool = True
    ) -> Trace | None:
        """Renders the template once more, with marks around messages and generations.

        Args:
            values: The template's variables.
            text: The text without marks.
            with_turns: Mark the iterations of loops over messages, not only
                generations.

        Returns:
            The trace; None if the marks change the text, as for a template that
            measures or trims what it has printed.
        """
        if self._marks is None or self._marked is None:
            self._marks = _Marks()
            sandbox = _chat_sandbox(self._marks)
            tree = _LoopMarker().visit(sandbox.parse(self.source))
            self._marked = sandbox.from_string(
                tree, globals=self._functions | self._marks.functions()
            )
        self._marks.begin(values["messages"] if with_turns else [])
        self._start_clock()
        return self._marks.read(self._marked.render(values), text)


def _chat_sandbox(marks: "_Marks | None") -> _Sandbox:
    return _Sandbox(marks, trim_blocks=True, lstrip_blocks=True)


class _LoopMarker(NodeTransformer):
    """Makes each loop print marks around itself and at the start of each iteration."""

    def visit_For(self, node: nodes.For):
        self.generic_visit(node)
        if not isinstance(node.target, nodes.Name):
            return node
        item = nodes.Name(node.target.name, "load")
        node.body.insert(0, _call("_pass_begins", item))
        return [_call("_loop_begins"), node, _call("_loop_ends")]


def _call(function: str, *arguments: nodes.Expr) -> nodes.Output:
    name = nodes.Name(function, "load")
    return nodes.Output([nodes.Call(name, list(arguments), [], None, None)])


class _Marks:
    """Prints marks into a text, and parses them out of it again.

    A loop is marked from its first iteration over a message: `o3` opens it at message
    3, `e4` continues it at message 4, `c` closes it. `s` and `f` enclose a generation.
    """

    def __init__(self):
        # Marks contain a random key, so that the text of a record cannot imitate them.
        self._secret = secrets.token_hex(8)
        self._pattern = re.compile(f"\0{self._secret}([a-z][0-9]*)\0")
        self._index_of: dict[int, int] = {}
        self._loops: list[bool] = []

    def functions(self) -> dict[str, Callable[..., str]]:
        """The functions that marked templates call."""
        return {
            "_loop_begins": self._loop_begins,
            "_pass_begins": self._pass_begins,
            "_loop_ends": self._loop_ends,
            "_generation_begins": lambda: self._mark("s"),
            "_generation_ends": lambda: self._mark("f"),
        }

    def begin(self, messages: Sequence[Any]) -> None:
        """Prepares to mark a rendering of these messages."""
        self._index_of = {id(message): i for i, message in enumerate(messages)}
        self._loops = []

    def _mark(self, content: str) -> str:
        return f"\0{self._secret}{content}\0"

    def _loop_begins(self) -> str:
        self._loops.append(False)
        return ""

    def _pass_begins(self, item: Any) -> str:
        index = self._index_of.get(id(item))
        if index is None:
            return ""
        kind = "e" if self._loops[-1] else "o"
        self._loops[-1] = True
        return self._mark(f"{kind}{index}")

    def _loop_ends(self) -> str:
        return self._mark("c") if self._loops.pop() else ""

    def read(self, marked: str, text: str) -> Trace | None:
        """Parses the marks in `marked`; None if the rest is not equal to `text`."""
        pieces = self._pattern.split(marked)
        if "".join(pieces[::2]) != text:
            return None
        turns: dict[int, list[Span]] = {}
        generations, begun = [], None
        passes: list[tuple[int, int]] = []
        place = tail_start = 0
        for piece, mark in zip(pieces[::2], [*pieces[1::2], ""], strict=True):
            place += len(piece)
            if mark[:1] in ("e", "c"):
                if not passes:
                    return None
                index, start = passes.pop()
                if place > start:
                    turns.setdefault(index, []).append((start, place))
                tail_start = place
            if mark[:1] in ("o", "e"):
                passes.append((int(mark[1:]), place))
            elif mark == "s":
                begun = place
            elif mark == "f":
                if begun is None:
                    return None
                message = passes[-1][0] if passes else None
                generations.append((begun, place, message))
                begun = None
        return (
            None
            if passes or begun is not None
            else Trace(turns, generations, tail_start)
        )


def _printed(value: Any) -> Any:
    if isinstance(value, jinja2.Undefined):
        return value  # which raises, as text, and says its name
    if value is None:
        raise jinja2.TemplateError(
            "a value in {{ }} is null; write {{ field or '' }} if that is right"
        )
    return check_printed(value)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    # Jinja's own filter escapes HTML. That of transformers does not, and has options.
    return json.dumps(
        without_absent(value),
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
