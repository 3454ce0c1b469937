"""The results of a run, as tests compare them."""

import numpy as np

import jaxlora
from jaxlora import RunConfig, Trainer
from jaxlora.adapters.files.peft_import import import_peft
from jaxlora.hf.load import FrozenModel
from jaxlora.models.structure import linear_shapes
from jaxlora.run.log import read_events


class Outcome:
    """Returns a run's adapters and the losses of every step and evaluation."""

    def __init__(self, trainer: Trainer, result, model: FrozenModel):
        self.trainer, self.result = trainer, result
        self.progress = {job.name: job.progress for job in result.jobs}
        given = linear_shapes(model.config)
        self.adapters = {
            job.name: import_peft(
                job.folder, given, score_size=model.config.hidden_size
            ).modules
            for job in result.jobs
            if job.folder
        }
        self.bytes = {
            job.name: (job.folder / "adapter_model.safetensors").read_bytes()
            for job in result.jobs
            if job.folder
        }
        events = read_events(trainer.output_dir / "metrics.jsonl")
        self.losses = {
            name: [e["loss"] for e in events if is_of(e, "step", name)]
            for name in self.progress
        }
        self.norms = {
            name: [e["grad_norm"] for e in events if is_of(e, "step", name)]
            for name in self.progress
        }
        self.evals = {
            name: [e["eval_loss"] for e in events if is_of(e, "eval", name)]
            for name in self.progress
        }


def is_of(event: dict, kind: str, job: str) -> bool:
    return event["event"] == kind and event.get("job") == job


def outcome(config: RunConfig, model: FrozenModel, **options) -> Outcome:
    """Trains a run; the options are those of `Trainer.train`."""
    trainer = Trainer(config, model)
    return Outcome(trainer, trainer.train(**options), model)


def assert_generates_alike(model, folder, merged):
    """A base with an adapter generates what the merged model does."""
    texts = ["Abc", "xyz and so on"]
    given = jaxlora.generate(model, texts, adapters=[folder], max_new_tokens=6)
    wanted = jaxlora.generate(merged, texts, max_new_tokens=6)
    for one, other in zip(given, wanted, strict=True):
        assert one.token_ids == other.token_ids
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)
