"""Texts that the jobs of a run generate at their evaluations, from their own slots."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxlora.adapters.slots import SlotTable
from jaxlora.config.generation_settings import SamplesConfig
from jaxlora.data.tokenizer import Tokenizer
from jaxlora.generate.generator import TextDecoder, end_ids
from jaxlora.generate.prompt import Generation, prompt_text, sample_prompts
from jaxlora.hf.load import FrozenModel
from jaxlora.train.execute.slot_decoder import SlotDecoder

_BATCH_SIZE = 16


class Sampler:
    """Generates texts with the adapters of a run while it trains.

    The slots are only read, and generation has programs of its own. So training does
    the same, to the bit, with and without it.
    """

    def __init__(
        self,
        config: SamplesConfig,
        model: FrozenModel,
        tokenizer: Tokenizer,
        decoder: SlotDecoder,
    ):
        """Makes the object; nothing is compiled yet.

        Args:
            config: Prompts and settings.
            model: The base model of the run.
            tokenizer: The model's tokenizer.
            decoder: The run's decoder with its slots.

        Raises:
            JaxloraError: As for `sample_prompts`.
        """
        self._config, self._tokenizer, self._decoder = config, tokenizer, decoder
        self._end_ids = end_ids(model, tokenizer)
        self._prompts = sample_prompts(config, model.config, tokenizer)

    def generate(
        self, slots: Mapping[str, int], tables: Sequence[SlotTable]
    ) -> dict[str, list[dict[str, Any]]]:
        """Generates a text for each prompt with each of some adapters.

        Args:
            slots: Slots of the adapters, by job.
            tables: The slots of the run, between two optimizer steps of these jobs.

        Returns:
            What a `SampleEvent` has of each text, in the order of the prompts, by job.
        """
        prompts = [
            dataclasses.replace(prompt, adapter=job)
            for job in slots
            for prompt in self._prompts
        ]
        decoder = TextDecoder(
            decoder=self._decoder.loaded(tables),
            tokenizer=self._tokenizer,
            slots=slots,
            end_ids=self._end_ids,
        )
        made = decoder.generate(prompts, self._config, _BATCH_SIZE)
        texts: dict[str, list[dict[str, Any]]] = {job: [] for job in slots}
        for generation in made:
            mine = texts[str(generation.prompt.adapter)]
            mine.append(_values(len(mine), generation))
        return texts


def _values(number: int, generation: Generation) -> dict[str, Any]:
    return {
        "number": number,
        "prompt": prompt_text(generation.prompt),
        "text": generation.text,
        "finish_reason": generation.finish_reason,
    }
