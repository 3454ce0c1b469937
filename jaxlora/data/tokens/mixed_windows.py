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
from jaxlora.data.tokens.mixture import arranged, describe_shares, joined
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
        # Both answers of a pair that is taken apart are in one window.
        self._drawn_groups = max(reader.groups_of_record for reader in readers)
        unit = job.batch_size * self._drawn_groups
        largest = max(reader.num_groups for reader in readers)
        self.num_groups = -(-largest // unit) * unit

    def read(self, place: StreamPlace) -> Window:
        """Reads the window at a place."""
        drawn_sets = self._sources(place.window)
        starts = place.parts or (StreamPlace(),) * len(self._readers)
        parts: dict[str, TokenizedData] = {}
        sources, indices = np.zeros_like(drawn_sets), np.zeros_like(drawn_sets)
        ends, shards = list(starts), []
        for number, reader in enumerate(self._readers):
            is_drawn = drawn_sets == number
            if not (num := int(is_drawn.sum())):
                continue
            found = reader.take(starts[number], num)
            sources[is_drawn], indices[is_drawn] = len(parts), np.arange(num)
            parts[self._names[number]] = joined([window.data for window in found])
            ends[number] = found[-1].after
            shards += dict.fromkeys(name for one in found for name in one.shards)
        order = f"interleaving ({describe_shares(self._job.data)})"
        data = arranged(parts, sources, indices, order)
        return Window(
            place=dataclasses.replace(place, digest=data.fingerprint),
            after=StreamPlace(
                step=place.step + len(sources) // self._job.batch_size,
                window=place.window + 1,
                parts=tuple(ends),
            ),
            data=dataclasses.replace(data, is_part=True),
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
