"""Rows of transformers with peft: one adapter, on the same tokens.

The adapter is bfloat16 like the base, which is the fastest setting that peft has. On
experts, its rank is that of `expert_rank: scaled`, and gate and up share A. peft has no
dropout there, and hence none in such a model. Gated delta nets run through
flash-linear-attention where that is installed; without it, transformers lets samples of
a row see each other, or refuses.
"""

import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxlora.objectives.sample import TokenizedSample
from jaxlora.profile.training import GIB, time_steps
from scripts.bench.report import needs_gpu
from scripts.bench.shapes import config_json
from scripts.bench.step.cases import Case, Row, microbatches, result

if TYPE_CHECKING:
    import torch

IGNORED = -100  # labels with this value are left out of transformers' loss
_NAMES = ("q", "k", "v", "o", "gate", "up", "down", "out")
_LINEARS = [
    *(f"{name}_proj" for name in _NAMES),
    *(f"in_proj_{name}" for name in ("qkv", "z", "b", "a")),  # of gated delta nets
]
_PARAMETERS = ["experts.gate_up_proj", "experts.down_proj"]
_GROUP = 4  # samples that are padded to the same length


class Part(NamedTuple):
    """Samples that go through the model at once."""

    inputs: dict[str, Any]  # keyword arguments of the model, without labels
    labels: "torch.Tensor"  # token ids of targets, `IGNORED` elsewhere
    num_targets: int


def missing() -> str | None:
    """Returns which packages are lacking here, or None."""
    needs = ("torch", "transformers", "peft")
    lacking = [name for name in needs if importlib.util.find_spec(name) is None]
    return f"{', '.join(lacking)} not installed" if lacking else None


def measure(case: Case, row: Row) -> dict[str, Any]:
    """Returns the row's columns, or only `skipped`: why it cannot run."""
    reason = missing()
    if reason is not None:
        return {"skipped": reason}
    import torch

    cuda = torch.cuda.is_available()
    reason = needs_gpu(case.model, cuda)
    if reason is not None:
        return {"skipped": reason}
    device = "cuda" if cuda else "cpu"
    torch.manual_seed(0)
    model = _model(case, device)
    drawn = microbatches(case, model.config.vocab_size)
    dtype = getattr(torch, case.dtype)
    is_hybrid = "linear_attention" in getattr(model.config, "layer_types", ())
    parts = functools.partial(_parts, dtype=dtype, device=device, is_hybrid=is_hybrid)
    batches = [parts(m.samples, row.layout) for m in drawn]
    step = _step(model, [part for batch in batches for part in batch])
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    times = time_steps(lambda: _queued(step, cuda), case.repeats)
    name = torch.cuda.get_device_name() if cuda else device
    found = result(times, sum(m.num_tokens for m in drawn), name)
    peak = round(torch.cuda.max_memory_allocated() / GIB, 2) if cuda else None
    return found | {"peak_gib": peak, "program_gib": None}


def _queued(step: Callable[[], None], cuda: bool) -> Callable[[], object]:
    """Starts a step, and returns a function that waits for its end."""
    import torch

    step()
    if not cuda:
        return lambda: None
    event = torch.cuda.Event()
    event.record()
    return event.synchronize


def _model(case: Case, device: str):
    import torch
    import transformers

    fields = config_json(case.model, case.layers)
    kind = fields.pop("model_type")
    config = transformers.AutoConfig.for_model(kind, **fields)
    dtype = getattr(torch, case.dtype)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation="sdpa"
        )
    model.config.use_cache = False
    # peft makes adapters in float32, whatever the dtype of the base.
    return _with_adapter(model, case).to(dtype).train()


def _with_adapter(model, case: Case):
    import peft

    own: dict[str, Any] = {"lora_dropout": case.dropout}
    if chosen := getattr(model.config, "num_experts_per_tok", None):
        ranks = dict.fromkeys(_PARAMETERS, max(1, case.rank // chosen))
        own = {"target_parameters": _PARAMETERS, "rank_pattern": ranks}
    lora = peft.LoraConfig(
        r=case.rank,
        lora_alpha=32,
        target_modules=_LINEARS,
        task_type="CAUSAL_LM",
        **own,
    )
    return peft.get_peft_model(model, lora, autocast_adapter_dtype=False)


def _parts(
    samples: Sequence[TokenizedSample],
    layout: str,
    dtype: "torch.dtype",
    device: str,
    is_hybrid: bool,
) -> list[Part]:
    if layout == "padded":
        return _padded(samples, device)
    return [_packed(samples, dtype, device, is_hybrid)]


def _num_targets(samples: Sequence[TokenizedSample]) -> int:
    return sum(int(s.is_target.sum()) for s in samples)


def _labels(sample: TokenizedSample) -> "torch.Tensor":
    import torch

    labels = torch.tensor(sample.token_ids, dtype=torch.long)
    labels[~torch.tensor(sample.is_target)] = IGNORED
    return labels


def _packed(
    samples: Sequence[TokenizedSample],
    dtype: "torch.dtype",
    device: str,
    is_hybrid: bool,
) -> Part:
    """Puts all samples into one row, in which each attends only to itself.

    Args:
        samples: The samples.
        dtype: Dtype of the block mask.
        device: Where the tensors go.
        is_hybrid: Whether some layers have a gated delta net, which takes the ends of
            the samples in place of a mask.
    """
    import torch

    ids = [torch.tensor(s.token_ids, dtype=torch.long) for s in samples]
    positions = [torch.arange(len(s.token_ids)) for s in samples]
    owner = torch.cat([torch.full_like(x, i) for i, x in enumerate(ids)]).to(device)
    is_visible = (owner[:, None] == owner).tril()
    mask = torch.zeros(is_visible.shape, dtype=dtype, device=device)
    mask.masked_fill_(~is_visible, torch.finfo(dtype).min)
    inputs = {
        "input_ids": torch.cat(ids)[None].to(device),
        "position_ids": torch.cat(positions)[None].to(device),
        "attention_mask": mask[None, None],
    }
    if is_hybrid:
        masks = {"full_attention": mask[None, None], "linear_attention": None}
        ends = torch.tensor([0, *map(len, ids)], device=device).cumsum(0)
        inputs |= {"attention_mask": masks, "cu_seq_lens_q": ends}
    labels = torch.cat([_labels(s) for s in samples])[None].to(device)
    return Part(inputs, labels, _num_targets(samples))


def _padded(samples: Sequence[TokenizedSample], device: str) -> list[Part]:
    """Sorts samples by length and pads each group to its longest."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    samples = sorted(samples, key=lambda s: len(s.token_ids))
    out = []
    for i in range(0, len(samples), _GROUP):
        group = samples[i : i + _GROUP]
        ids = [torch.tensor(s.token_ids, dtype=torch.long) for s in group]
        is_real = pad_sequence([torch.ones_like(x) for x in ids], batch_first=True)
        labels = pad_sequence(
            [_labels(s) for s in group], batch_first=True, padding_value=IGNORED
        )
        inputs = {
            "input_ids": pad_sequence(ids, batch_first=True).to(device),
            "attention_mask": is_real.to(device),
        }
        out.append(Part(inputs, labels.to(device), _num_targets(group)))
    return out


def _step(model, parts: Sequence[Part]) -> Callable[[], None]:
    """Returns a function that runs one step of the model's trained parameters."""
    import torch

    total = sum(part.num_targets for part in parts)
    trained = [p for p in model.parameters() if p.requires_grad]
    fused = next(model.parameters()).device.type == "cuda"
    adamw = torch.optim.AdamW(trained, lr=1e-5, fused=fused)

    def step() -> None:
        for part in parts:
            out = model(**part.inputs, labels=part.labels, use_cache=False)
            (out.loss * (part.num_targets / total)).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        adamw.step()
        adamw.zero_grad(set_to_none=True)

    return step
