"""Measured times of a device: `jaxlora profile` writes them, and plans read them.

There is one file for each kind of device in the user's cache. It holds a profile for
each model and choice of kernels that was measured there. A file that is damaged, of
another version, or that another user may have written counts as missing.
"""

import functools
import hashlib
import pathlib
from importlib import metadata
from typing import Annotated, Literal

import pydantic

from jaxlora._version import __version__
from jaxlora.common.atomic import write_bytes
from jaxlora.common.cache_home import (
    DeviceFile,
    device_path,
    make_private,
    read_private,
    validated,
)
from jaxlora.common.json_file import parse_json
from jaxlora.costs.gpus import DeviceSpeed
from jaxlora.costs.stages import decoder_seconds, total
from jaxlora.errors import ConfigError
from jaxlora.models.spec import DecoderSpec
from jaxlora.programs.key import canonical
from jaxlora.scheduler import AffineCost

_FOLDER = "profiles"  # in the user's cache
_MOST_PROFILES = 64  # of a device; the oldest goes first
_MEAN_TOKENS = 512.0  # of the estimates that two decoders are compared by

# No device has other times and rates, and a prediction from these is finite.
_Amount = Annotated[float, pydantic.Field(ge=0, le=1e15, allow_inf_nan=False)]
_Positive = Annotated[float, pydantic.Field(ge=1e-15, le=1e15, allow_inf_nan=False)]
_Share = Annotated[float, pydantic.Field(ge=0, le=1)]
_Count = Annotated[int, pydantic.Field(ge=0, le=2**63)]


class _Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, strict=True)


class Kernels(_Strict):
    """The implementations that run a decoder's operations."""

    dtype: str
    base_format: str | None
    implementation: str
    attention: str

    @staticmethod
    def of(spec: DecoderSpec) -> "Kernels":
        """Returns the kernels of a decoder."""
        options, stored = spec.options, spec.options.base_format
        return Kernels(
            dtype=options.dtype.name,
            base_format=None if stored is None else stored.name,
            implementation=options.implementation,
            attention=options.attention,
        )

    def __str__(self) -> str:
        stored = "" if self.base_format is None else f"{self.base_format} and "
        parts = f"{self.implementation} kernels, {self.attention} attention"
        return f"{parts}, {stored}{self.dtype}"


class PassTime(_Strict):
    """The measured time of both passes of a microbatch through all layers.

    Attributes:
        tokens: Tokens of the microbatch, which fill its compiled shape.
        squares: Sum of the squared lengths of its samples.
        seconds: Median time.
    """

    tokens: _Count
    squares: _Count
    seconds: _Positive


class MemoryAt(_Strict):
    """Memory of a run with microbatches of one size.

    Attributes:
        tokens: Tokens of a microbatch.
        needed_bytes: What the compiler reports, with weights and slots; None: nothing.
        peak_bytes: The allocator's peak after the steps; None: it reports none.
    """

    tokens: _Count
    needed_bytes: _Count | None
    peak_bytes: _Count | None


class LinkRate(_Strict):
    """Time of a transfer between two devices of the machine."""

    base_seconds: _Amount
    bytes_per_second: _Positive


class PassCost(_Strict):
    """See `AffineCost`; in seconds."""

    base: _Amount
    per_token: _Amount
    per_square: _Amount

    def __call__(self, tokens: float, squares: float) -> float:
        """Returns the time of both passes of a microbatch."""
        return AffineCost(**self.model_dump())(tokens, squares)


class Profile(_Strict):
    """Measurements of one model with one choice of kernels, on one device.

    Attributes:
        model: Digest of the model's architecture and of how it is stored.
        description: The model in words.
        kernels: Its kernels.
        remat: What the backward pass recomputed.
        rank: Rank of the slots.
        num_slots: Number of slots.
        adapter_bytes: Bytes of the slots' weights.
        estimate: Estimated time of a token in both passes, by which decoders with
            another `remat` or rank are compared.
        jax_version: Version of jax.
        jaxlora_version: Version of jaxlora.
        measured: Day and time of the end, in ISO format.
        passes: The measured passes.
        cost: Their fit.
        mape: Its mean absolute percentage error, as a fraction.
        padding: Time of a row of padding, as a share of that of a token.
        step_seconds: Time of an optimizer step of all slots.
        memory: Memory by the size of microbatches.
        link: Transfers between devices; None: there is one device.
    """

    model: str
    description: str
    kernels: Kernels
    remat: str
    rank: _Count
    num_slots: _Count
    adapter_bytes: _Count
    estimate: _Positive
    jax_version: str
    jaxlora_version: str
    measured: str
    passes: tuple[PassTime, ...]
    cost: PassCost
    mape: _Amount
    padding: _Share = 1.0
    step_seconds: _Amount
    memory: tuple[MemoryAt, ...]
    link: LinkRate | None

    @property
    def key(self) -> tuple:
        """The key by which a later measurement replaces this one."""
        return self.model, self.kernels

    def seconds(
        self, spec: DecoderSpec, speed: DeviceSpeed, tokens: float, squares: float
    ) -> float:
        """Predicts the time of both passes of a microbatch through all layers.

        The estimates by the data sheet correct for another `remat` or rank.

        Args:
            spec: The whole decoder, which `find_profile` has matched.
            speed: Rates of the device by its data sheet.
            tokens: Tokens of the microbatch's compiled shape.
            squares: Sum of the squared lengths of its samples.
        """
        return estimate(spec, speed) / self.estimate * self.cost(tokens, squares)


class _File(DeviceFile):
    version: Literal[1]
    profiles: Annotated[tuple[Profile, ...], pydantic.Field(max_length=_MOST_PROFILES)]


def estimate(spec: DecoderSpec, speed: DeviceSpeed) -> float:
    """Estimates the time of a token in both passes of a whole decoder."""
    return total(decoder_seconds(spec, speed, mean_tokens=_MEAN_TOKENS)).both


@functools.lru_cache(maxsize=32)  # a choice of a mesh asks hundreds of times
def model_digest(spec: DecoderSpec) -> str:
    """Returns a digest of a decoder's architecture and of how it is stored."""
    parts = spec.config, spec.options.dtype, spec.options.base_format
    return hashlib.sha256(canonical(parts).encode()).hexdigest()


def versions() -> dict[str, str]:
    """Returns the versions that a profile is of."""
    return {"jax_version": metadata.version("jax"), "jaxlora_version": __version__}


# ---- choosing ------------------------------------------------------------------------


def find_profile(
    profiles: tuple[Profile, ...], spec: DecoderSpec
) -> tuple[Profile | None, str]:
    """Finds the profile of a decoder.

    Args:
        profiles: The device's profiles, at least one.
        spec: The decoder.

    Returns:
        The profile, or None; and a line that says why.
    """
    digest, kernels = model_digest(spec), Kernels.of(spec)
    same = [p for p in profiles if p.model == digest]
    instead = "times follow the data sheet instead. `jaxlora profile` measures"
    if not same:
        return None, f"profile: this model was not measured here; {instead} it."
    same = [p for p in same if p.kernels == kernels]
    if not same:
        return None, f"profile: no measurement is with {kernels}; {instead} that."
    (found,) = same
    for name, here in versions().items():
        if (then := getattr(found, name)) != here:
            package = name.removesuffix("_version")
            text = f"it was measured with {package} {then}, and {here} is installed"
            return None, f"profile: {text}; {instead} anew."
    day = found.measured[:10]
    return found, f"profile: times follow what was measured here on {day} ({kernels})"


# ---- the file ------------------------------------------------------------------------


def read_text(device_kind: str) -> str | None:
    """Reads the file of a device; None, with a line in the log, if it cannot be used.

    Only a file of this user, in a folder of this user, is read.
    """

    def checked(text: str) -> str:
        parse(text, device_kind)
        return text

    return read_private(_FOLDER, device_kind, checked)


def parse(text: str | None, device_kind: str) -> tuple[Profile, ...]:
    """Reads the profiles in the text of a file; there are none in None.

    Raises:
        ValueError: The text is damaged, of another version or of another device.
    """
    if text is None:
        return ()
    value = parse_json(text)
    version = value.get("version") if isinstance(value, dict) else None
    if version != 1:
        raise ValueError(f"its version is {version!r:.40}, and 1 is known")
    found = validated(_File, text, device_kind)
    keys = [profile.key for profile in found.profiles]
    if len(set(keys)) < len(keys):
        raise ValueError("it has two profiles of the same model and kernels")
    return found.profiles


def _own_path(device_kind: str) -> pathlib.Path:
    """Returns the path in the cache, in a folder that is there."""
    try:
        path = device_path(_FOLDER, device_kind)
    except RuntimeError as error:
        why = "there is no home folder for the cache: give --output."
        raise ConfigError(why) from error
    try:
        make_private(path.parent)
    except OSError as error:
        why = f"{path.parent}: {error.strerror}. Or give --output."
        raise ConfigError(why) from error
    return path


def write_profile(
    device_kind: str, profile: Profile, output: pathlib.Path | None = None
) -> pathlib.Path:
    """Adds a profile to a file, in the place of an older one of the same kind.

    Args:
        device_kind: JAX's name of the device.
        profile: The profile.
        output: The file, which is made anew; None: the device's file in the cache.

    Returns:
        The path of the file.

    Raises:
        ConfigError: There is no home folder for the cache, or others may write there.
        StorageError: The file cannot be written; the old one is unchanged.
    """
    path, others = output, ()
    if path is None:
        path = _own_path(device_kind)
        others = parse(read_text(device_kind), device_kind)
    kept = [p for p in others if p.key != profile.key][-_MOST_PROFILES + 1 :]
    file = _File(version=1, device=device_kind, profiles=(*kept, profile))
    write_bytes(path, file.model_dump_json(indent=1).encode() + b"\n", mode=0o600)
    return path
