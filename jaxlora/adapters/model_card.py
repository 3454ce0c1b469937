"""The model card of an adapter: README.md in its PEFT folder."""

import pathlib
from collections.abc import Mapping
from typing import Any

import yaml

from jaxlora.json_file import read_regular_file

CARD_FILE = "README.md"
# The last line of a card. A folder whose card ends otherwise holds a user's own text.
_MARK = "<!-- Written by jaxlora. Remove this line to keep your changes. -->"
_SHOWN = (
    *("rank", "lora_alpha", "use_rslora", "dropout", "target_modules", "batch_size"),
    *("epochs", "steps", "learning_rate", "lr_schedule", "warmup_steps"),
    *("warmup_ratio", "lora_plus_ratio", "weight_decay", "max_grad_norm"),
    *("max_length", "seed"),
)


def model_card(
    *,
    name: str,
    base_model: str,
    revision: str | None,
    job: Mapping[str, Any],
    figures: Mapping[str, Any],
    version: str,
) -> str:
    """Returns the text of a card, which begins with the hub's YAML.

    Args:
        name: Name of the adapter.
        base_model: Folder or hub id of the base.
        revision: Commit of a base from the hub.
        job: Settings of the job, by the names of `LoraJob`.
        figures: What was measured, by what it is; entries that are None are left out.
        version: Version of jaxlora.
    """
    is_on_hub = _is_hub_id(base_model)
    data = job.get("data") or {}
    front: dict[str, Any] = {"base_model": base_model} if is_on_hub else {}
    front |= {
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "tags": ["lora", "jaxlora", "text-generation"],
    }
    if is_on_hub:
        front["tags"].insert(0, f"base_model:adapter:{base_model}")
    if _is_hub_id(str(data.get("path", ""))):
        front["datasets"] = [data["path"]]
    measured = {key: value for key, value in figures.items() if value is not None}
    settings = {key: job[key] for key in _SHOWN if job.get(key) is not None}
    where = f" at revision `{revision}`" if revision else ""
    parts = [
        f"---\n{yaml.safe_dump(front, sort_keys=False)}---",
        f"# {name}",
        f"A LoRA adapter for `{base_model}`{where}, trained with jaxlora {version}.",
        "## Use",
        _usage(base_model, revision),
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
    """Whether this program wrote a card, and nobody claimed it since."""
    try:
        return read_regular_file(path).decode().rstrip().endswith(_MARK)
    except (OSError, ValueError):
        return False


def _is_hub_id(name: str) -> bool:
    """Whether a name may be of the hub: it is no path and no file that is here."""
    is_path = name.startswith(("/", ".", "~")) or name.count("/") != 1
    return not (is_path or pathlib.PurePath(name).suffix in _SUFFIXES) and not (
        pathlib.Path(name).exists()
    )


_SUFFIXES = {".jsonl", ".json", ".parquet", ".csv", ".arrow", ".feather"}


def _usage(base_model: str, revision: str | None) -> str:
    given = f', revision="{revision}"' if revision else ""
    return (
        "```python\n"
        "from peft import PeftModel\n"
        "from transformers import AutoModelForCausalLM\n\n"
        f'base = AutoModelForCausalLM.from_pretrained("{base_model}"{given})\n'
        'model = PeftModel.from_pretrained(base, "path or id of this adapter")\n'
        "```"
    )


def _data(data: Mapping[str, Any]) -> str:
    # A path may hold a user's name, so only the file's own name is told.
    path = str(data.get("path", ""))
    shown = path if _is_hub_id(path) else pathlib.PurePath(path).name
    trained = "every token" if data.get("loss_on") == "all" else "the answers"
    return f"`{shown or 'unknown'}`; the loss is that of {trained}."


def _table(values: Mapping[str, Any]) -> str:
    rows = [f"| {key} | {_shown(value)} |" for key, value in values.items()]
    return "\n".join(["| | |", "|---|---|", *rows])


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        value = ", ".join(map(str, value))
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")
