"""Types of the fields in a run's files, which are checked when a file is read.

A file in a run's folder is untrusted: it may be damaged or come from another source.
So every name, number and shape that is read is checked like the user's input.
"""

import datetime
import functools
import unicodedata
from typing import Annotated, Any

import pydantic
from pydantic import AfterValidator, Field

from jaxlora.common.job_name import check_job_name

STRICT = pydantic.ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


@functools.cache
def type_adapter(kind: Any) -> pydantic.TypeAdapter:
    """Returns pydantic's adapter of a type; to make that of a saved run takes 20 ms."""
    return pydantic.TypeAdapter(kind)


def _one_line(text: str) -> str:
    if not text or any(unicodedata.category(c) in ("Cc", "Cs") for c in text):
        raise ValueError("wanted one line of text.")
    return text


def _iso_time(text: str) -> str:
    datetime.datetime.fromisoformat(text)
    return text


JobName = Annotated[str, AfterValidator(check_job_name)]
OneLine = Annotated[str, Field(max_length=4096), AfterValidator(_one_line)]
IsoTime = Annotated[str, AfterValidator(_iso_time)]
Size = Annotated[int, Field(gt=0, lt=2**40)]
Count = Annotated[int, Field(ge=0, lt=2**53)]
