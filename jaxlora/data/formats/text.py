"""A text, all of which is trained on."""

from jaxlora.config import DataConfig
from jaxlora.data.formats.example import Example
from jaxlora.data.formats.format import Format, Reading, field, has
from jaxlora.data.records.files import Record


def fits(record: Record, data: DataConfig) -> bool:
    """Whether a record has a text."""
    return has(record, data.text)


def convert(record: Record, reading: Reading) -> Example:
    """Makes an example of it."""
    (name,) = reading.fields
    return Example(completions=(field(record, name),))


FORMAT = Format(kind="text", fits=fits, convert=convert, settings=("text",))
