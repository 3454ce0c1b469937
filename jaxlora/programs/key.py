"""The key of a kept program: a hash of everything that may change the program.

A wrong hit would train with another program than the user's. So a value that has no
canonical form is an error, and what is left out is named here with the reason.
"""

import dataclasses
import enum
import functools
import hashlib
import os
import pathlib
import platform
import sys
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax._src import config as jax_config
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

_PACKAGE = pathlib.Path(__file__).parents[1]
_IMPORTED = time.time_ns()  # the package's modules are imported around this time

# Packages whose code is in programs, or compiles or runs them, by how names begin.
_LIBRARIES = ("jax", "flax", "optax", "nvidia", "triton", "numpy", "ml_dtypes")

# Settings of JAX that change where caches, dumps, logs and checks are, and no program.
_NO_MATTER = (
    "jax_compilation_cache",
    "jax_persistent_cache",
    "jax_raise_persistent_cache_errors",
    "jax_enable_compilation_cache",
    "jax_dump_ir",
    "jax_log",
    "jax_explain",
    "jax_traceback",
    "jax_transfer_guard",
    "jax_platforms",  # the devices are in the key
    "jax_include_full_tracebacks",
    "jax_compiler_detailed_logging",
)
# Settings of a trace that hold nothing outside of a transformation.
_TRACE_STATE = ("axis_env_state", "mesh_context_manager")

# Variables that a compiler or JAX reads, by how names begin.
_VARIABLES = ("XLA_", "TF_", "JAXLORA_", "TRITON_", "NVIDIA_TF32", "CUBLAS_", "CUDNN_")
# Sizes of JAX's memory pool (it is chosen by what is free), and our own switches.
_NOT_VARIABLES = (
    "XLA_PYTHON_CLIENT_",
    "XLA_CLIENT_MEM_FRACTION",
    "JAXLORA_TESTS_",
    "JAXLORA_KEEP_PROGRAMS",
)


def program_key(identity: Any, arguments: Any) -> str:
    """Returns the key of a program, in hexadecimal digits.

    Args:
        identity: What the function is: its name and all values that it closes over.
        arguments: Its arguments, or their shapes; see `jax.ShapeDtypeStruct`.
    """
    leaves, tree = jax.tree.flatten(arguments)
    parts = identity, str(tree), [_argument(leaf) for leaf in leaves]
    text = "\n".join([*environment(), canonical(parts), canonical(jax_settings())])
    return hashlib.sha256(text.encode()).hexdigest()


def _argument(leaf: Any) -> Any:
    """Describes shape, dtype, weak type and placement of an argument."""
    sharding = getattr(leaf, "sharding", None)
    if isinstance(leaf, jax.Array) and not leaf.committed:
        sharding = None  # it goes where the others are
    aval = jax.typeof(leaf) if isinstance(leaf, jax.Array) else leaf
    if not isinstance(aval, jax.ShapeDtypeStruct) and sharding is None:
        aval = jax.typeof(leaf)
    weak = bool(getattr(aval, "weak_type", False))
    return tuple(aval.shape), np.dtype(aval.dtype), weak, sharding


# ---- canonical form ------------------------------------------------------------------


def canonical(value: Any) -> str:
    """Returns a text that is equal in all processes for equal values, and only then.

    Raises:
        TypeError: The value is of a kind whose text may differ or may be incomplete.
    """
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if value is None or isinstance(value, bool | int | float | str | bytes | range):
        return f"{kind}:{value!r}"
    if isinstance(value, enum.Enum):
        return f"{kind}:{value.name}"
    if isinstance(value, np.dtype):
        return f"dtype:{value.name}"
    if isinstance(value, type):
        return f"type:{value.__module__}.{value.__qualname__}"
    if isinstance(value, Mapping):
        items = sorted((canonical(k), canonical(v)) for k, v in value.items())
        return f"{kind}{{{','.join(f'{k}={v}' for k, v in items)}}}"
    if isinstance(value, set | frozenset):
        return f"{kind}{{{','.join(sorted(map(canonical, value)))}}}"
    if isinstance(value, PartitionSpec | tuple | list):
        return f"{kind}({','.join(map(canonical, value))})"
    if dataclasses.is_dataclass(value):
        names = (field.name for field in dataclasses.fields(value))
        return (
            f"{kind}({','.join(f'{n}={canonical(getattr(value, n))}' for n in names)})"
        )
    return f"{kind}{_placement(value)}"


def _placement(value: Any) -> str:
    if isinstance(value, jax.Device):
        return (
            f"({value.platform},{value.device_kind},{value.id},{value.process_index})"
        )
    if isinstance(value, Mesh):
        devices = [canonical(device) for device in value.devices.flat]
        parts = value.axis_names, value.axis_types, value.devices.shape
        return canonical((*parts, devices))
    if isinstance(value, NamedSharding):
        return canonical((value.mesh, value.spec, value.memory_kind))
    if isinstance(value, SingleDeviceSharding):
        return canonical((*value.device_set, value.memory_kind))
    raise TypeError(f"{type(value).__name__} has no canonical form: {value!r:.80}")


# ---- what all programs of a process share --------------------------------------------


def jax_settings() -> dict[str, str]:
    """Returns the settings of JAX that may change a program, by name."""
    trace = zip(
        jax_config.trace_context_names(), jax_config.trace_context(), strict=True
    )
    found = {name: repr(value) for name, value in trace if name not in _TRACE_STATE}
    for name, value in jax.config.values.items():
        if not name.startswith(_NO_MATTER):
            found.setdefault(name, repr(value))
    unclear = [name for name, text in found.items() if " at 0x" in text]
    if unclear:
        raise TypeError(f"settings of JAX have no canonical form: {unclear}")
    return found


@functools.cache
def environment() -> tuple[str, ...]:
    """Describes code, libraries, machine, devices and environment variables."""
    return (
        f"package {source_stamp().digest}",
        f"python {sys.version} {platform.machine()}",
        *_library_versions(),
        *_machine(),
        *(canonical(device) for device in jax.devices()),
        f"backend {jax.devices()[0].client.platform_version}",
        f"process {jax.process_index()} of {jax.process_count()}",
        *_variables(),
    )


class SourceStamp(NamedTuple):
    """The package's files as they were when they were read.

    Attributes:
        digest: Hash of their names and contents: code, and tables of kernel tiles.
        stats: Name, size and time of each file.
    """

    digest: str
    stats: list[tuple[str, int, int]]

    def is_current(self) -> bool:
        """Whether the files are those of the modules of this process, and still are."""
        newest = max(time_ns for _, _, time_ns in self.stats)
        return newest < _IMPORTED and self.stats == _source_stats()


@functools.cache
def source_stamp() -> SourceStamp:
    """Reads all files of the package."""
    stats, found = _source_stats(), hashlib.sha256()
    for name, size, _ in stats:
        found.update(f"{name}\0{size}\0".encode())
        found.update((_PACKAGE / name).read_bytes())
    return SourceStamp(found.hexdigest(), stats)


def _source_stats() -> list[tuple[str, int, int]]:
    """Returns name, size and time of each file; called for each program, so by strings.

    Paths of `pathlib` take ten times as long.
    """
    stats, root = [], str(_PACKAGE)
    # Some folders of a checkout are links to the folders beside the package.
    for folder, folders, names in os.walk(root, followlinks=True):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        inside = folder[len(root) + 1 :].replace(os.sep, "/")
        for name in sorted(names):
            try:
                found = os.stat(f"{folder}{os.sep}{name}")
            except FileNotFoundError:  # it was removed just now, or is a dead link
                continue
            short = f"{inside}/{name}" if inside else name
            stats.append((short, found.st_size, found.st_mtime_ns))
    return stats


def _library_versions() -> list[str]:
    """Names of the installed libraries with their versions, in the order of sys.path.

    To read their metadata would take longer than to load a program.
    """
    found = []
    for place in sys.path:
        try:
            names = sorted(os.listdir(place or "."))
        except OSError:
            continue
        found += [
            name
            for name in names
            if name.endswith((".dist-info", ".egg-info"))
            and name.lower().startswith(_LIBRARIES)
        ]
    return [*found, f"jax {jax.__version__}"]


def _machine() -> list[str]:
    """Describes the processor, for which XLA compiles, and the driver of the GPUs."""
    found = [f"processors {os.cpu_count()} {len(os.sched_getaffinity(0))}"]
    found.append(f"NPROC {os.environ.get('NPROC')}")
    for path in ("/proc/cpuinfo", "/proc/driver/nvidia/version"):
        try:
            text = pathlib.Path(path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        kinds = ("model name", "flags", "Features", "CPU part", "NVRM", "GCC")
        found += sorted({line for line in text.splitlines() if line.startswith(kinds)})
    return found


def _variables() -> list[str]:
    return [
        f"{name}={value}"
        for name, value in sorted(os.environ.items())
        if name.startswith(_VARIABLES) and not name.startswith(_NOT_VARIABLES)
    ]
