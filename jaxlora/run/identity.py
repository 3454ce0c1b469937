"""The identity of a run, and what may change when it is resumed."""

import dataclasses
import logging
import pathlib
from collections.abc import Collection, Mapping
from typing import Any

from jaxlora.errors import CheckpointError
from jaxlora.modules.trained_tensors import tensor_settings
from jaxlora.run.saved_fields import STRICT, JobName

logger = logging.getLogger(__name__)

_SHAPE = "the saved weights and optimizer state have the shape that it gives"
_SCALING = "the saved weights were trained with this scaling"
_POSITION = "the position in the data follows from it"
_MOMENTS = "the saved optimizer state was made with it"

# Settings of a job that must not change on resume, and the reasons. Data is compared by
# its fingerprint, so that files may be moved.
FIXED_IN_JOB: dict[str, str] = {
    "data_fingerprint": _POSITION,
    "batch_size": _POSITION,
    "shuffle": _POSITION,
    "seed": _POSITION,
    "rank": _SHAPE,
    "rank_pattern": _SHAPE,
    "expert_rank": _SHAPE,
    "target_modules": _SHAPE,
    "target_parameters": _SHAPE,
    "exclude_modules": _SHAPE,
    "layers_to_transform": _SHAPE,
    "layers_pattern": _SHAPE,
    "trainable_token_indices": _SHAPE,
    "new_special_tokens": _SHAPE,
    "modules_to_save": _SHAPE,
    "lora_alpha": _SCALING,
    "alpha_pattern": _SCALING,
    "use_rslora": _SCALING,
    "projection_prng_key": "the saved vectors were trained with these matrices",
    "d_initial": "the job has started by it",
    "init_lora_weights": "the job has started by it",
    "init_from": "the job has started from it",
    "init_from_fingerprint": "the job has started from it",
    "reference_fingerprint": "the job has been compared with it",
    "clone_of": "the job has started as that copy",
    "objective": "the saved optimizer state was made with its gradients",
    "objective_args": "the saved optimizer state was made with its gradients",
    "optimizer": "the saved optimizer state is its own",
    "optimizer_args": _MOMENTS,
    "dropout": "an exported adapter states one dropout for all of its steps",
    "adam_b1": _MOMENTS,
    "adam_b2": _MOMENTS,
    "adam_eps": _MOMENTS,
    "keep_best": "the best weights so far were exported, or not, by the old setting",
    "eval_data_fingerprint": "the best loss so far was measured on it",
}
# Settings that give tensors to an adapter have the shape of the saved weights, too.
FIXED_IN_JOB |= dict.fromkeys(tensor_settings(), _SHAPE)
# Settings of a run that must not change. The others only change how samples share
# microbatches, and so results by no more than rounding.
_BASE = "the saved weights were trained on such a base"
FIXED_IN_RUN = {
    "dtype": _BASE,
    "quantize_base": _BASE,
    "keep_bf16": _BASE,
    "quantize_base_args": _BASE,
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunIdentity:
    """Properties of a run that are compared when it is resumed; JSON values.

    Attributes:
        base: Fingerprint of the base model; empty if its weights are not known. It is
            not compared then.
        settings: Settings of the base that change its products, by name.
        jobs: Each job's settings, and a fingerprint of its data, by job name, in the
            order in which slots and microbatches are filled.
    """

    __pydantic_config__ = STRICT

    base: str
    settings: dict[str, Any]
    jobs: dict[JobName, dict[str, Any]]

    def limited_to(self, names: Collection[str]) -> "RunIdentity":
        """Returns the identity without jobs of other names."""
        jobs = {name: job for name, job in self.jobs.items() if name in names}
        return dataclasses.replace(self, jobs=jobs)

    def differences(self, saved: "RunIdentity") -> list[str]:
        """Describes the differences that prevent a saved run from being resumed.

        Args:
            saved: Identity in the run's record.
        """
        out = []
        if self.base and self.base != saved.base:
            out.append(
                f"the base model is another one (fingerprint {saved.base[:12]} in "
                f"run.json, {self.base[:12]} now)"
            )
        out += _refused("", saved.settings, self.settings, FIXED_IN_RUN)
        for name, then in saved.jobs.items():
            now = self.jobs.get(name)
            if now is None:
                out.append(
                    f"job {name!r} is in run.json but not in this run: keep it, and "
                    "stop it with stop_job"
                )
            else:
                out += _refused(f"job {name!r}: ", then, now, FIXED_IN_JOB)
        return out


def _refused(
    whose: str,
    then: Mapping[str, Any],
    now: Mapping[str, Any],
    fixed: Mapping[str, str],
) -> list[str]:
    return [
        f"{whose}{_difference(key, then.get(key), now.get(key))}, but must not "
        f"change, as {reason}"
        for key, reason in fixed.items()
        if then.get(key) != now.get(key)
    ]


def _difference(key: str, then: Any, now: Any) -> str:
    return f"{key} is {then!r} in run.json and {now!r} now"


def check_same_run(now: RunIdentity, then: RunIdentity, path: pathlib.Path) -> None:
    """Refuses to resume a run with changes that it cannot continue with.

    Args:
        now: Identity of the run to resume.
        then: Identity that was saved.
        path: The run.json that it was saved in.

    Raises:
        CheckpointError: The identities differ too much; the text says how.
    """
    if differences := now.differences(then):
        raise CheckpointError(
            f"{path} is of another run:\n- "
            + "\n- ".join(differences)
            + "\nRestore these settings, or train into another output_dir."
        )
