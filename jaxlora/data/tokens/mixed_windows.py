"""Windows of several data sets that are streamed, in shares.

The data set of each sample is drawn as `datasets.interleave_datasets` does, from the
job's seed and the number of the draw, without an end: a data set that ends begins anew.
A window takes as many samples of each data set as were drawn, the next ones of its own
stream.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from jaxlora.config import LoraJob
from jaxlora.data.order import StreamPlace, drawn
from jaxlora.data.tokens.mixture import arranged, describe_shares
from jaxlora.data.tokens.tokenized_data import TokenizedData
from jaxlora.data.tokens.windows import Window, WindowReader, Windows


class MixedWindows(Windows):
    """Reads windows of several data sets; a place has that of each of them."""

    def __init__(self, readers: Sequence[WindowReader], job: LoraJob):
        """Reads no window yet.

        Args:
            readers: Reads each data set.
            job: Settings of a job, of which the names and shares of the data sets, the
                seed and `batch_size` count.
        """
        super().__init__()
        self._readers, self._job = readers, job
        self._names = job.data.set_names
        self.shards = {
            f"{name}: {shard}": fingerprint
            for name, reader in zip(self._names, readers, strict=True)
            for shard, fingerprint in reader.shards.items()
        }
        # Of a pair that is taken apart, both answers are in one window.
        self._drawn_groups = max(reader.groups_of_record for reader in readers)
        unit = job.batch_size * self._drawn_groups
        largest = max(reader.num_groups for reader in readers)
        self.num_groups = -(-largest // unit) * unit

    def read(self, place: StreamPlace) -> Window:
        """Reads the window at a place."""
        sources = self._sources(place.window)
        starts = place.parts or (StreamPlace(),) * len(self._readers)
        parts: dict[str, TokenizedData] = {}
        ends, shards, numbers = [], [], np.empty(len(sources), np.int64)
        first = 0
        for number, (reader, start) in enumerate(
            zip(self._readers, starts, strict=True)
        ):
            num = int((sources == number).sum())
            found = reader.take(start, num) if num else []
            ends.append(found[-1].after if found else start)
            for turn, window in enumerate(found):
                name = self._names[number]
                parts[f"{name} again ({turn})" if turn else name] = window.data
                shards += window.shards
            numbers[sources == number] = first + np.arange(num)
            first += num
        data = self._arranged(parts, numbers)
        return Window(
            place=dataclasses.replace(place, digest=data.fingerprint),
            after=StreamPlace(
                step=place.step + len(sources) // self._job.batch_size,
                window=place.window + 1,
                parts=tuple(ends),
            ),
            data=data,
            shards=tuple(shards),
        )

    def _sources(self, window: int) -> Int[np.ndarray, " N"]:
        """Returns the data set of each group of a window."""
        num = self.num_groups // self._drawn_groups
        shares = self._job.data.probabilities
        if shares is None:
            found = np.arange(window * num, (window + 1) * num) % len(self._readers)
        else:
            found = drawn(shares, self._job.seed, first=window * num, num=num)
        return np.repeat(found, self._drawn_groups)

    def _arranged(
        self, parts: dict[str, TokenizedData], numbers: Int[np.ndarray, " N"]
    ) -> TokenizedData:
        """Returns groups in an order, given their numbers, counted over all parts."""
        sizes = [len(part.group_lengths) for part in parts.values()]
        starts = np.cumsum([0, *sizes])
        sources = np.searchsorted(starts, numbers, side="right") - 1
        order = f"interleaving ({describe_shares(self._job.data)})"
        data = arranged(parts, sources, numbers - starts[sources], order)
        return dataclasses.replace(data, is_part=True)
