"""An instruction, maybe an input, and the output, in the text of Stanford Alpaca."""

import dataclasses

from jaxlora.config import DataConfig
from jaxlora.data.formats.example import Example
from jaxlora.data.formats.format import Format, Reading, as_text, field
from jaxlora.data.records.files import Record

FIELDS = ("instruction", "input", "output")
# The prompts of Stanford Alpaca, with the line break that its data set and later tools
# have after "Response:".
_PROMPT = (
    "Below is an instruction that describes a task{paired}. Write a response that "
    "appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n{input}### Response:\n"
)
_PAIRED = ", paired with an input that provides further context"


def fits(record: Record, data: DataConfig) -> bool:
    """Whether a record has an instruction and an output."""
    return "instruction" in record and "output" in record


def convert(record: Record, reading: Reading) -> Example:
    """Makes an example of the prompt and the output."""
    prompt = make_prompt(record, chat=reading.data.chat)
    return Example(prompt, (field(record, "output"),), tools=record.get("tools"))


def make_prompt(record: Record, *, chat: bool) -> str:
    """Makes a prompt of the instruction and the input.

    In a chat it is the instruction, followed by the input, if any, in a new line.
    Otherwise it is Alpaca's text.
    """
    instruction = as_text(field(record, "instruction"), "instruction")
    given = as_text(record.get("input") or "", "input")
    if chat:
        return f"{instruction}\n{given}" if given else instruction
    paired, given = (_PAIRED, f"### Input:\n{given}\n\n") if given else ("", "")
    return _PROMPT.format(paired=paired, instruction=instruction, input=given)


def decide(reading: Reading, first: Record) -> Reading:
    """Leaves out the field of the input, if the first record has none."""
    is_whole = fits(first, reading.data)
    fields = tuple(name for name in FIELDS if name in first or not is_whole)
    return dataclasses.replace(reading, fields=fields)


FORMAT = Format(kind="alpaca", fits=fits, convert=convert, decide=decide)
