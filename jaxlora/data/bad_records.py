"""Handling of records that cannot be used: raise an error, or drop and count them."""

import logging

from jaxlora.config import DataConfig
from jaxlora.errors import DataError

_log = logging.getLogger(__name__)

_NUM_NAMED = 5


class BadRecords:
    """Applies the setting `data.bad_records` and counts the dropped records.

    Attributes:
        num: Records that were left out.
    """

    def __init__(self, data: DataConfig):
        self._data = data
        self._first = ""
        self.num = 0

    def add(self, number: int, error: DataError) -> None:
        """Leaves out record `number`; the log names the first few.

        Raises:
            DataError: `data.bad_records` is `error`.
        """
        what = f"record {number}: {error}"
        if self._data.bad_records == "error":
            raise DataError(
                f"{self._data.path}: {what} (data.bad_records: drop leaves out such "
                "records.)"
            ) from error
        self.num += 1
        self._first = self._first or what
        if self.num <= _NUM_NAMED:
            _log.warning("%s: dropped %s", self._data.path, what)
        if self.num == _NUM_NAMED:
            _log.warning(
                "%s: further records that are dropped are only counted.",
                self._data.path,
            )

    def describe(self) -> str:
        """Describes the dropped records for an error: their number, and the first."""
        if not self.num:
            return ""
        return f", and {self.num} cannot be used (the first: {self._first})"
