"""Settings of `jaxlora serve`."""

import ipaddress
import pathlib
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from jaxlora.common.yaml_file import line_finder
from jaxlora.config.base_settings import BaseSettings
from jaxlora.config.overrides import override
from jaxlora.config.run_file import read_mapping
from jaxlora.config.session_config import SamplingConfig, SessionConfig
from jaxlora.config.strict import (
    Bool,
    InputPath,
    Number,
    OutputPath,
    PositiveFloat,
    PositiveInt,
    StrictModel,
    Wrong,
)
from jaxlora.problems import Source, problems_of, settings_error

TENANT = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")  # the name of one
MOST_ENGINES = 100  # more would have longer names
Port = Annotated[int, Field(ge=1, le=65_535)]
# Shares beyond these would leave nothing to others, or to the tenant itself.
Weight = Annotated[float, Field(ge=0.001, le=1000.0), Number]
# Clients ask for results, and send heartbeats, within a minute.
KeptSeconds = Annotated[float, Field(ge=60.0), Number]
# More are a slip of the keyboard.
Completions = Annotated[int, Field(gt=0, le=65_536), Number]


class Tls(StrictModel):
    """Certificate with which the server speaks HTTPS itself.

    Attributes:
        certificate: PEM file of the certificate, and of those between it and the root.
        key: PEM file of its private key.
    """

    certificate: InputPath
    key: InputPath


class Quota(StrictModel):
    """Most that a tenant may have or use; a setting left out is not limited.

    Attributes:
        models: Models that are not unloaded.
        slots: Models that are in slots of the device at the same time.
        pending_tokens: Tokens of requests that are not done: those of passes, and
            those of prompts with the most that samples may have. Further ones are
            refused with 429, and clients send them again.
        tokens_per_second: Tokens of passes, prompts and samples a second on average;
            more of them wait.
        storage_bytes: Bytes of checkpoints and uploads.
        weight: Share of the device beside other tenants that wait for it, too.
    """

    models: PositiveInt | None = None
    slots: PositiveInt | None = None
    pending_tokens: PositiveInt | None = None
    tokens_per_second: PositiveFloat | None = None
    storage_bytes: PositiveInt | None = None
    weight: Weight = 1.0


class RequestLimits(StrictModel):
    """Most that one request may hold; a larger one is refused before it is read.

    Attributes:
        body_bytes: Bytes of the body, after decompression.
        upload_bytes: Bytes of an uploaded file of training data.
        open_bytes: Bytes of the bodies of all requests of a tenant that are being
            answered. Further ones are refused with 429.
        kept_bytes: Bytes of a tenant's samples that are kept after they were drawn.
            Beyond it, the oldest are dropped, and first those that were sent already.
        body_seconds: Seconds without a byte after which the server gives up a body.
        datums: Datums.
        tokens: Tokens of all datums. The longest datum is bounded by
            `session.microbatch_tokens`.
        samples: Completions of a prompt.
    """

    body_bytes: PositiveInt = 64 * 2**20
    upload_bytes: PositiveInt = 2**30
    open_bytes: PositiveInt = 2**30
    kept_bytes: PositiveInt = 2**30
    body_seconds: PositiveFloat = 60.0
    datums: PositiveInt = 4096
    tokens: PositiveInt = 2**20
    samples: Completions = 256


class Retention(StrictModel):
    """How long the server keeps what nobody asks for.

    Attributes:
        heartbeat_seconds: After so long without a heartbeat of its client, the models
            of a session leave their slots. They go on with the next request.
        session_seconds: After so long without a heartbeat and a request, the models of
            a session are unloaded. What belongs to it is forgotten, but for models that
            have checkpoints.
        promise_seconds: How long results wait to be asked for.
        sampler_seconds: How long published weights without a name are kept after their
            last use.
    """

    heartbeat_seconds: KeptSeconds = 300.0
    session_seconds: KeptSeconds = 604800.0
    promise_seconds: KeptSeconds = 3600.0
    sampler_seconds: KeptSeconds = 3600.0


class Snapshots(StrictModel):
    """How often a model gets a snapshot; what came after it is redone after a crash.

    Attributes:
        steps: After so many optimizer steps ...
        seconds: ... or so many seconds after its first change since the last snapshot.
    """

    steps: PositiveInt = 50
    seconds: PositiveFloat = 120.0


def _remote(serve: Any, wrong: Wrong) -> None:
    if not serve.demands_keys and not serve.is_local:
        wrong["keys"] = (
            f"keys: false with host: {serve.host} would let everyone who reaches this "
            "machine use the server. Leave keys out, so that they are demanded, or "
            "host, so that only this machine reaches it."
        )
    elif not serve.demands_keys and serve.behind_proxy:
        wrong["keys"] = (
            "keys: false with behind_proxy: true would let everyone who reaches the "
            "proxy use the server. Leave keys out, so that they are demanded."
        )
    elif not serve.is_local and serve.tls is None and not serve.behind_proxy:
        wrong["host"] = (
            f"host: {serve.host} can be reached from other machines, and without TLS "
            "keys and data would be readable on the way. Set tls to a certificate and "
            "its key, set behind_proxy: true if a proxy in front of this server "
            "speaks TLS, or leave host out."
        )


def _behind(serve: Any, wrong: Wrong) -> None:
    if serve.behind_proxy and serve.tls is not None:
        wrong["tls"] = (
            "behind_proxy: true says that TLS ends at the proxy. Leave out one of the "
            "two."
        )


class ServerSession(SessionConfig):
    """Settings of a server's session, whose default rank is that of Tinker's client.

    Attributes:
        host_bytes: Memory of the host for adapters that are in no slot; beyond it, they
            go to files. Engines share it equally. By default half of what is available
            when the server starts.
    """

    rank: PositiveInt = 32
    host_bytes: PositiveInt | None = None


def _tenants(serve: Any, wrong: Wrong) -> None:
    names = [name for name in serve.quotas if not TENANT.fullmatch(name)]
    if names:
        wrong["quotas"] = (
            f"quotas: {names[0]!r:.100} is no tenant, whose name has 1 to 63 small "
            "letters, digits, '_' and '-', and begins with a letter or digit. Write "
            "it as in jaxlora keys, or default for all others."
        )


class ServeConfig(BaseSettings):
    """Settings of `jaxlora serve`.

    Attributes:
        model: The base model: a folder or a hub id.
        folder: Where the server keeps its database, checkpoints and logs of requests.
        session: Slots, ranks and microbatches, as in `jaxlora.Session`.
        sampling: Versions and rows of sampling, and its share of the time.
        model_name: The name by which clients ask for the model; by default `model`.
        revision: Branch, tag or commit of a hub id.
        dtype: Dtype of the weights that are not quantized.
        host: Address to listen on. By default, only this machine reaches the server.
        port: Port to listen on.
        keys: Whether requests need a key. By default they do unless only this machine
            reaches the server.
        tls: Certificate with which the server speaks HTTPS.
        behind_proxy: Whether a proxy in front of the server speaks HTTPS with clients.
        public_url: Address by which clients reach the server, for links in answers;
            by default that of each request.
        database: URL of the database, `sqlite:///PATH` or
            `postgresql://USER:PASSWORD@HOST/NAME`; by default a file in `folder`.
        storage: URL of the storage of checkpoints and uploads, such as
            `s3://BUCKET/PREFIX`, `gs://`, `az://` or `file://`; by default a folder in
            `folder`.
        storage_options: Settings of the storage, such as `{region: eu-central-1}`.
        cache_bytes: Bytes of files of a remote storage that are kept in `folder`.
        train_unembed: What to do if a client asks to train the output layer, which
            adapters here leave alone: refuse, or ignore it and say so in the answer.
        datasets: Data that jobs of all tenants may name: a path or a hub id by name.
        engines: Engines that share this address, each a process with a GPU of its own;
            `auto`: one for each visible GPU.
        running_jobs: Jobs that an engine runs at the same time. By default as many as
            it has slots; others wait.
        quotas: Quotas by tenant; `default` has those of all others.
        limits: Most that one request may hold.
        retention: How long the server keeps what nobody asks for.
        snapshots: How often a model gets a snapshot.
    """

    rules = (*BaseSettings.rules, _remote, _behind, _tenants)
    belongs = {
        name: f"the session. Write session: {{{name}: ...}}"
        for name in SessionConfig.model_fields
    }

    model: InputPath
    folder: OutputPath = "serve"
    session: ServerSession = ServerSession()
    sampling: SamplingConfig = SamplingConfig()
    model_name: str | None = None
    revision: str | None = None
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    host: str = "127.0.0.1"
    port: Port = 8765
    keys: Bool | None = None
    tls: Tls | None = None
    behind_proxy: Bool = False
    public_url: str | None = None
    database: str | None = None
    storage: str | None = None
    storage_options: dict[str, Any] = {}
    cache_bytes: PositiveInt = 20 * 2**30
    train_unembed: Literal["refuse", "ignore"] = "ignore"
    datasets: dict[str, InputPath] = {}
    engines: Annotated[int, Field(ge=1, le=MOST_ENGINES)] | Literal["auto"] = 1
    running_jobs: PositiveInt | None = None
    quotas: dict[str, Quota] = {}
    limits: RequestLimits = RequestLimits()
    retention: Retention = Retention()
    snapshots: Snapshots = Snapshots()

    @property
    def num_engines(self) -> int:
        """The number of engines; `auto` has been replaced by one."""
        assert self.engines != "auto"
        return self.engines

    @property
    def is_local(self) -> bool:
        """Whether only this machine reaches `host`."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def demands_keys(self) -> bool:
        """Whether requests need a key."""
        if self.keys is not None:
            return self.keys
        return not self.is_local or self.behind_proxy

    @property
    def served_name(self) -> str:
        """The name by which clients ask for the model."""
        return self.model_name or self.model

    @property
    def database_url(self) -> str:
        """URL of the database."""
        path = pathlib.Path(self.folder).absolute() / "serve.db"
        return self.database or f"sqlite:///{path}"

    @property
    def storage_url(self) -> str:
        """URL of the storage."""
        return self.storage or (pathlib.Path(self.folder).absolute() / "files").as_uri()

    def quota(self, tenant: str) -> Quota:
        """Returns the quota of a tenant."""
        return self.quotas.get(tenant) or self.quotas.get("default") or Quota()


def load_serve(path: str | pathlib.Path, overrides: Sequence[str] = ()) -> ServeConfig:
    """Reads the settings of a server from a YAML file.

    Args:
        path: The file. Paths in it are relative to the working directory.
        overrides: Settings in place of those of the file, such as `session.slots=8`.

    Raises:
        ConfigError: The file is missing or is not YAML, keys are unknown, or values are
            invalid. The message lists all such keys, with their lines and values.
    """
    text, values = read_mapping(path, "server file", "the keys model and folder")
    values, found, _ = override(values, overrides, ServeConfig)
    try:
        return ServeConfig.model_validate(values)
    except pydantic.ValidationError as error:
        source = Source(str(path), line_finder(text), found)
        raise settings_error(problems_of(error, values), source) from None
