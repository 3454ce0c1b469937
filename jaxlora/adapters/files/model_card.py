"""The model card of an adapter: README.md in its PEFT folder."""

import pathlib
import re
from collections.abc import Mapping
from typing import Any

import huggingface_hub

from jaxlora.adapters.files.base_name import BaseName, is_hub_id, last_part
from jaxlora.adapters.files.tokenizer_copy import template_settings
from jaxlora.common.json_file import read_regular_file
from jaxlora.printable import one_line

CARD_FILE = "README.md"
# The last line of a card. A folder whose card ends otherwise holds a user's own text.
_MARK = "<!-- Written by jaxlora. Remove this line to keep your changes. -->"
# Numbers and words with commas between them, which mean nothing else in Markdown.
_WORD = "-?[A-Za-z0-9]+([_.+-]+[A-Za-z0-9]+)*"
_PLAIN = re.compile(f"{_WORD}(,? {_WORD})*")
_SHOWN = (
    *("rank", "lora_alpha", "use_rslora", "dropout", "target_modules", "batch_size"),
    *("epochs", "steps", "learning_rate", "lr_schedule", "warmup_steps"),
    *("warmup_ratio", "lora_plus_ratio", "weight_decay", "max_grad_norm"),
    *("max_length", "seed"),
)


def model_card(
    *,
    name: str,
    base: BaseName,
    job: Mapping[str, Any],
    figures: Mapping[str, Any],
    version: str,
    has_tokenizer: bool = False,
    is_part: bool = False,
) -> str:
    """Returns the text of a card, which begins with the hub's YAML.

    Args:
        name: Name of the adapter.
        base: The base.
        job: Settings of the job, by the names of `LoraJob`.
        figures: What was measured, by what it is; entries that are None are left out.
        version: Version of jaxlora.
        has_tokenizer: Whether the tokenizer lies beside the adapter.
        is_part: Whether the base is the text model of a model of text and images.
    """
    data = job.get("data") or {}
    on_hub = [one["path"] for one in _sets(data) if is_hub_id(one["path"])]
    of_base = [f"base_model:adapter:{base.name}"] if base.is_on_hub else []
    front = huggingface_hub.CardData(
        base_model=base.name if base.is_on_hub else None,
        library_name="peft",
        pipeline_tag="text-generation",
        tags=[*of_base, "lora", "jaxlora", "text-generation"],
        datasets=list(dict.fromkeys(on_hub)) or None,
    )
    measured = {key: value for key, value in figures.items() if value is not None}
    settings = {key: job[key] for key in _SHOWN if job.get(key) is not None}
    parts = [
        f"---\n{front.to_yaml()}\n---",
        f"# {_escaped(name)}",
        f"A LoRA adapter for {_described(base)}, trained with jaxlora {version}.",
        "## Use",
        _usage(base, has_tokenizer, is_part),
        *([_tokenizer(data)] if has_tokenizer else []),
        "## Data",
        _data(data),
        "## Results",
        _table(measured) if measured else "Nothing was measured.",
        "## Training",
        _table(settings),
        _MARK,
    ]
    return "\n\n".join(parts) + "\n"


def write_card(folder: pathlib.Path, text: str) -> None:
    """Writes the card of an adapter into its folder."""
    (folder / CARD_FILE).write_text(text, encoding="utf-8")


def is_our_card(path: pathlib.Path) -> bool:
    """Whether this program wrote a card that has not been edited since."""
    try:
        return read_regular_file(path).decode().rstrip().endswith(_MARK)
    except (OSError, ValueError):
        return False


def _described(base: BaseName) -> str:
    if not base.is_on_hub:
        return f"a base in a local folder named {_code(base.name)}"
    where = f" at revision {_code(base.revision)}" if base.revision else ""
    return f"{_code(base.name)}{where}"


def _tokenizer(data: Mapping[str, Any]) -> str:
    """Says which chat template the tokenizer in the folder has."""
    settings = template_settings(data)
    if not settings:
        return "The tokenizer in this folder is that of the base."
    more = ""
    if len(settings) > 1:
        more = " Its data sets have several templates, of which this is the first."
    return (
        "The tokenizer in this folder has the chat template that the adapter was "
        f"trained with, which chats need.{more}"
    )


def _usage(base: BaseName, has_tokenizer: bool, is_part: bool) -> str:
    """Returns an example; names are literals of Python, so no name becomes code."""
    given = f", revision={base.revision!r}" if base.revision else ""
    note = "" if base.is_on_hub else "# A local folder: give its path, or its hub id.\n"
    kind = "AutoModelForImageTextToText" if is_part else "AutoModelForCausalLM"
    names, load = kind, ""
    if has_tokenizer:
        names += ", AutoTokenizer"
        load = "tokenizer = AutoTokenizer.from_pretrained(adapter)\n"
    return (
        "```python\n"
        "from peft import PeftModel\n"
        f"from transformers import {names}\n\n"
        'adapter = "path or id of this adapter"\n'
        f"{note}"
        f"base = {kind}.from_pretrained({base.name!r}{given})\n"
        "model = PeftModel.from_pretrained(base, adapter)\n"
        f"{load}"
        "```"
    )


def _sets(data: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns the data sets, each with a path."""
    return data.get("datasets") or [{"path": ""} | dict(data)]


_TRAINED = {
    "completion": "the answers",
    "last": "the last answer of each chat",
    "all": "every token",
}


def _data(data: Mapping[str, Any]) -> str:
    shown = []
    for one in _sets(data):
        # A path may hold a user's name, so only the file's own name is told.
        path = one["path"] if is_hub_id(one["path"]) else last_part(one["path"])
        trained = _TRAINED[one.get("loss_on", "completion")]
        shown.append(f"Records: {_code(path)}; the loss is that of {trained}.")
    if len(shown) > 1:
        shares = data.get("probabilities")
        text = "" if shares is None else f" by {', '.join(map(str, shares))}"
        shown.append(f"They are mixed: {data.get('mix')}{text}.")
    return "\n\n".join(shown)


def _table(values: Mapping[str, Any]) -> str:
    rows = [f"| {_cell(key)} | {_cell(value)} |" for key, value in values.items()]
    return "\n".join(["| | |", "|---|---|", *rows])


def _cell(value: Any) -> str:
    if isinstance(value, list | tuple):
        value = ", ".join(map(str, value))
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    shown = text if _PLAIN.fullmatch(text) else _code(text)
    return shown.replace("|", "\\|")  # also in code, a pipe would end the cell


def _code(text: str) -> str:
    """Returns a text as inline code of Markdown, which nothing in it can end."""
    text = one_line(text)
    runs = [len(run) for run in re.findall("`+", text)]
    fence = "`" * (max(runs, default=0) + 1)
    return f"{fence} {text} {fence}" if runs else f"{fence}{text}{fence}"


def _escaped(text: str) -> str:
    """Returns a text as Markdown that shows it as it is."""
    text = one_line(text)
    return text if _PLAIN.fullmatch(text) else re.sub(r"([^\w\s])", r"\\\1", text)
