"""Handling of records that cannot be used: raise an error, or drop and count them."""

from jaxlora.config import DataConfig
from jaxlora.data.notes import Notes
from jaxlora.errors import DataError

_NUM_NAMED = 5


class BadRecords:
    """Applies the setting `data.bad_records` and counts the dropped records.

    Attributes:
        first: Describes the first record that was left out; "" if there is none.
        num: Records that were left out.
    """

    def __init__(self, data: DataConfig, notes: Notes):
        self._data, self._notes = data, notes
        self.first = ""
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
        self.first = self.first or what
        if self.num <= _NUM_NAMED:
            self._notes.add(f"dropped {what}")
        if self.num == _NUM_NAMED:
            self._notes.add("further records that are dropped are only counted.")
