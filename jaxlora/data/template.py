"""Jinja templates of strangers: sandboxed, and stopped when they run for ever."""

import datetime
import functools
import json
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

# What one rendering may spend: a few seconds at worst, and a hundred times what a long
# conversation needs. An iteration costs 1.
MAX_WORK = 3_000_000
_COST_OF_CALL = 30
_COST_OF_LAZY_ITERATION = 10


class _Generation(jinja2.ext.Extension):
    """Reads `{% generation %}...{% endgeneration %}` as its body, unmarked."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Immutable sandbox that refuses unsafe attributes at once and counts its work."""

    intercepted_binops = frozenset(["*", "**"])

    def __init__(self, **options):
        super().__init__(extensions=[_Generation, jinja2.ext.loopcontrols], **options)
        self.work_left = MAX_WORK
        self.filters["tojson"] = _to_json
        self.filters["_counted"] = self._counted

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        # The default is a value that prints as nothing and raises only later.
        raise SecurityError(
            f"access to {attribute!r} of a {type(obj).__name__} is not allowed"
        )

    def call(self, context, obj, *args, **kwargs):
        again = isinstance(obj, LoopContext) and args and hasattr(args[0], "__len__")
        self._spend(_COST_OF_CALL + (len(args[0]) if again else 0))
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context, operator, left, right):
        if operator == "**":
            raise SecurityError("the operator ** is not allowed")
        for one, other in ((left, right), (right, left)):
            if hasattr(one, "__len__") and isinstance(other, int):
                self._spend(max(0, len(one) * other))
        return super().call_binop(context, operator, left, right)

    def compile_counted(
        self, source: str, functions: Mapping[str, Callable]
    ) -> jinja2.Template:
        """Compiles `source` so that each `for` pays for its length first."""
        tree = self.parse(source)
        for loop in list(tree.find_all(nodes.For)):
            counted = nodes.Filter(loop.iter, "_counted", [], [], None, None)
            loop.iter = counted.set_environment(self).set_lineno(loop.lineno)
        return self.from_string(tree, globals=dict(functions))

    def _counted(self, items):
        if hasattr(items, "__len__"):
            self._spend(len(items))
            return items
        return self._count_lazily(items)

    def _count_lazily(self, items):
        for item in items:
            self._spend(_COST_OF_LAZY_ITERATION)
            yield item

    def _spend(self, amount: int) -> None:
        self.work_left -= amount
        if self.work_left < 0:
            raise SecurityError(
                f"its loops and calls cost more than {MAX_WORK} iterations"
            )


class SafeTemplate:
    """A compiled template with functions of its own, rendered in the sandbox."""

    def __init__(
        self, sandbox: _Sandbox, source: str, functions: Mapping[str, Callable]
    ):
        self._sandbox = sandbox
        self._template = sandbox.compile_counted(source, functions)

    def render(self, values: Mapping[str, Any]) -> str:
        """Renders with `values`; whatever goes wrong is an exception of any type."""
        self._sandbox.work_left = MAX_WORK
        return self._template.render(values)


def chat_template(source: str, now: datetime.datetime) -> SafeTemplate:
    """Compiles a tokenizer's chat template with what transformers offers to it.

    Args:
        source: The template.
        now: The time that `strftime_now` tells.

    Raises:
        jinja2.TemplateSyntaxError: It does not parse.
    """
    functions = {"raise_exception": _raise_exception, "strftime_now": now.strftime}
    return SafeTemplate(
        _Sandbox(trim_blocks=True, lstrip_blocks=True), source, functions
    )


@functools.lru_cache(maxsize=64)
def record_template(source: str) -> SafeTemplate:
    """Compiles a template over a record's fields; unknown and null fields raise.

    Raises:
        jinja2.TemplateSyntaxError: It does not parse.
    """
    sandbox = _Sandbox(
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        finalize=_refuse_null,
    )
    return SafeTemplate(sandbox, source, {})


def _refuse_null(value: Any) -> Any:
    if value is None:
        raise jinja2.TemplateError(
            "a value in {{ }} is null; write {{ field or '' }} if that is right"
        )
    return value


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    # Jinja's own filter escapes HTML; transformers' does not, and offers options.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
