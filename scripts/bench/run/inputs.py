"""Random inputs of `python -m scripts.bench run`: a checkpoint, data and a run file."""

import dataclasses
import json
import string
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors.numpy
import tokenizers
import yaml
from tokenizers import decoders, models, pre_tokenizers

from jaxlora.models.registry import model_config
from jaxlora.models.structure import TensorSpec, tensor_specs
from jaxlora.profile.tokens import SIGMA, fill
from scripts.bench.shapes import config_json

_SPECIAL = ("<pad>", "<bos>", "<eos>")
_BLOCK = 2**25  # random numbers, which all weights repeat from places of their own
_WRITERS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
    """Sizes and settings of a run with random inputs.

    Attributes:
        model: One of `shapes.MODELS`.
        layers: Replaces the model's own number of layers, unless None.
        jobs: Number of jobs.
        tokens: Tokens of all jobs together, each trained on once.
        median_tokens: Median length of a sample. A byte is a token.
        longest_tokens: Largest length of a sample.
        batch_size: Samples of a job's global batch.
        settings: Further settings of the run file, such as `quantize_base`.
    """

    model: str
    layers: int | None = None
    jobs: int = 4
    tokens: int = 950_000
    median_tokens: int = 600
    longest_tokens: int = 2048
    batch_size: int = 8
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)


def write_checkpoint(inputs: Inputs, folder: Path) -> None:
    """Writes a checkpoint with random bfloat16 weights, unless it is there already."""
    config = config_json(inputs.model, inputs.layers)
    config |= {"torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2}
    path = folder / "config.json"
    if path.exists() and json.loads(path.read_text()) == config:
        return
    folder.mkdir(parents=True, exist_ok=True)
    groups: dict[str, list[TensorSpec]] = {}
    specs = tensor_specs(model_config(config))
    for spec in (part for whole in specs for part in whole.parts):
        layer = spec.hf_name.split(".")[2] if ".layers." in spec.hf_name else "rest"
        groups.setdefault(layer, []).append(spec)
    noise = np.random.default_rng(0).standard_normal(_BLOCK, np.float32)

    def write(name: str) -> dict[str, str]:
        tensors = {s.hf_name: _weight(s, noise) for s in groups[name]}
        file = f"model-{name}.safetensors"
        safetensors.numpy.save_file(tensors, folder / file)
        return dict.fromkeys(tensors, file)

    with ThreadPoolExecutor(_WRITERS) as pool:
        files = [pool.submit(write, name) for name in groups]
    index = {name: file for one in files for name, file in one.result().items()}
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    text = json.dumps({"metadata": {"total_size": size}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text)
    _write_tokenizer(folder)
    path.write_text(json.dumps(config))  # last, as it says that all is there


def _weight(spec: TensorSpec, noise: np.ndarray) -> np.ndarray:
    """Returns a weight that keeps activations near 1."""
    if spec.hf_name.endswith("norm.weight"):
        return np.ones(spec.hf_shape, ml_dtypes.bfloat16)
    if spec.hf_name.endswith(".bias"):
        return np.zeros(spec.hf_shape, ml_dtypes.bfloat16)
    start = sum(spec.hf_name.encode()) * 4099 % noise.size
    size = int(np.prod(spec.hf_shape))
    part = np.roll(noise, start)[: min(size, noise.size)] * spec.hf_shape[-1] ** -0.5
    return np.resize(part.astype(ml_dtypes.bfloat16), spec.hf_shape)


def _write_tokenizer(folder: Path) -> None:
    """Writes a tokenizer with a token for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate((*_SPECIAL, *alphabet))}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([tokenizers.AddedToken(t) for t in _SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = dict(zip(("pad_token", "bos_token", "eos_token"), _SPECIAL, strict=True))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind | names))


def write_data(inputs: Inputs, folder: Path) -> list[Path]:
    """Writes each job's samples, of log-normal lengths, as prompts and completions."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for job in range(inputs.jobs):
        path, rng = folder / f"job{job}.jsonl", np.random.default_rng(job)
        path.write_text("".join(json.dumps(r) + "\n" for r in _records(inputs, rng)))
        paths.append(path)
    return paths


def _records(inputs: Inputs, rng: np.random.Generator) -> Iterator[dict[str, str]]:
    letters = np.array(list(string.ascii_lowercase + " "))
    median = np.log(inputs.median_tokens)
    lengths = fill(
        inputs.tokens // inputs.jobs,
        inputs.longest_tokens - 2,  # the tokenizer adds a first and a last token
        lambda: rng.lognormal(median, SIGMA),
    )
    for length in lengths:
        text = "".join(rng.choice(letters, length))
        cut = max(1, int(0.7 * length))
        yield {"prompt": text[:cut], "completion": text[cut:] or "a"}


def write_run_file(
    inputs: Inputs, checkpoint: Path, data: list[Path], output_dir: Path
) -> Path:
    """Writes the run file, with evaluations and checkpoints on the way."""
    jobs = [
        {"name": path.stem, "data": {"path": str(path)}, "seed": number}
        for number, path in enumerate(data)
    ]
    steps = inputs.tokens / (inputs.jobs * inputs.batch_size * inputs.median_tokens)
    content = {
        "model": str(checkpoint),
        "output_dir": str(output_dir),
        "checkpoint_every": max(2, int(steps / 4)),
        "defaults": {
            "rank": 16,
            "dropout": 0.1,
            "batch_size": inputs.batch_size,
            "max_length": inputs.longest_tokens,
            "learning_rate": 1e-4,
            "eval_fraction": 0.05,
            "eval_every": max(2, int(steps / 3)),
        },
        "jobs": jobs,
        **inputs.settings,
    }
    path = output_dir.with_suffix(".yaml")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path
