"""The file of a server: what it may say, and what is refused."""

import ipaddress
import math
from typing import Any

import hypothesis
import pytest
import yaml
from hypothesis import strategies as st

from jaxlora.config.serve_config import (
    Quota,
    RequestLimits,
    Retention,
    ServeConfig,
    ServerSession,
    load_serve,
)
from jaxlora.config.session_config import SamplingConfig
from jaxlora.errors import ConfigError

FILE = """\
model: m
folder: here
session: {slots: 8, rank: 32, microbatch_tokens: [1024, 8192]}
quotas:
  default: {models: 4}
  alice: {weight: 2}
"""


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "serve.yaml"
    path.write_text(FILE)
    return path


def test_settings_come_from_the_file_and_the_command_line(path):
    config = load_serve(path, ["session.slots=16", "port=1234", "limits.datums=7"])
    assert (config.session.slots, config.session.rank, config.port) == (16, 32, 1234)
    assert config.limits.datums == 7 and config.limits.tokens > 7
    assert config.quota("alice") == Quota(weight=2.0)
    assert config.quota("bob") == Quota(models=4)
    assert config.database_url.endswith("/here/serve.db")
    assert config.storage_url.endswith("/here/files")
    assert config.served_name == "m"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["modle=x"], "modle=x: unknown key 'modle'. Did you mean 'model'?"),
        (["rank=8"], "'rank' is a setting of the session. Write session: {rank: ...}"),
        (["session.slot=8"], "Did you mean 'slots'?"),
        (["port=0"], "port=0: must be greater than or equal to 1"),
        (["keys=maybe"], "expected true or false"),
        (["train_unembed=never"], "'refuse' or 'ignore'"),
        (["quotas.alice.wieght=9"], "Did you mean 'weight'?"),
        (["quotas.al.weight=0"], "must be greater than or equal to 0.001"),
        (["session.microbatch_tokens=100"], "no multiple of block_tokens=64"),
        (["snapshots.steps=0"], "snapshots.steps=0: must be greater than 0"),
        (["snapshots.seconds=0"], "must be greater than 0"),
        (["snapshots.minutes=2"], "unknown key 'minutes'"),
        (["quotas.al.weight=1e9"], "must be less than or equal to 1000"),
        (["quotas.Alice.models=1"], "quotas: 'Alice' is no tenant"),
        (["retention.promise_seconds=1"], "must be greater than or equal to 60"),
        (["sampling.cache_tokens=1000"], "Set it to 1024 or more, or lower part_tok"),
        (["sampling.versions=1000000"], "must be less than or equal to 65536"),
        (["host"], "give settings as KEY=VALUE."),
    ],
)
def test_a_setting_that_cannot_be(path, overrides, words):
    with pytest.raises(ConfigError) as found:
        load_serve(path, overrides)
    assert words in str(found.value)


def test_all_problems_of_a_file_are_listed_with_their_lines(tmp_path):
    path = tmp_path / "serve.yaml"
    path.write_text("model: m\nprot: 1\nsession:\n  slots: many\n")
    with pytest.raises(ConfigError) as found:
        load_serve(path)
    lines = str(found.value).splitlines()
    assert "line 2: prot: unknown key 'prot'. Did you mean 'port'?" in lines[0]
    assert "line 4: session.slots: expected a number" in lines[1]
    path.write_text("- a\n")
    with pytest.raises(ConfigError, match="a server file is a mapping with the keys"):
        load_serve(path)


SECTIONS = {
    "session": ServerSession,
    "sampling": SamplingConfig,
    "limits": RequestLimits,
    "retention": Retention,
    "quotas.default": Quota,
}
# What rules between settings say of these is left out if the others are wrong.
RULED = {"session.microbatch_tokens", "sampling.cache_tokens"}
KEYS = [f"{name}.{key}" for name, kind in SECTIONS.items() for key in kind.model_fields]
VALUES = [
    *(0, -1, 1, 7, 64, 4096, 2**20, 2**31, 2**53, 2**64, 10**400),
    *(0.5, 1e-308, 1e308, math.inf, -math.inf, math.nan),
    *(None, True, "", "auto", "8", "layer", [], [64], [64, "x"], {}, {"a": 1}),
]


def _read(path, settings: dict[str, Any]) -> ServeConfig:
    """Reads a file with these settings, by dotted key."""
    values: dict[str, Any] = {"model": "m"}
    for key, value in settings.items():
        *sections, last = key.split(".")
        own = values
        for name in sections:
            own = own.setdefault(name, {})
        own[last] = value
    path.write_text(yaml.safe_dump(values))
    return load_serve(path)


@pytest.fixture(scope="module")
def any_file(tmp_path_factory):
    return tmp_path_factory.mktemp("config") / "serve.yaml"


@hypothesis.settings(max_examples=40)
@hypothesis.given(
    st.dictionaries(st.sampled_from(KEYS), st.sampled_from(VALUES), max_size=6)
)
def test_any_values_are_taken_or_refused_by_their_keys(any_file, given):
    """All that are wrong by themselves are named at once, each with its value."""
    wrong = set()
    for key, value in given.items():
        try:
            _read(any_file, {key: value})
        except ConfigError:
            wrong.add(key)
    try:
        config = _read(any_file, given)
    except ConfigError as error:
        lines = str(error).splitlines()
        for key in wrong - RULED:
            (line,) = [one for one in lines if f": {key}" in one]
            assert len(line) < 400
        assert wrong or len(given) > 1  # a rule between two
    else:
        assert not wrong
        assert ServeConfig.model_validate(config.model_dump()) == config


CERTIFICATE = {"certificate": "c.pem", "key": "k.pem"}


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.5", "gpu.example.org", ""])
def test_a_remote_bind_needs_keys_and_tls(host):
    for settings, words in (
        ({}, "set behind_proxy: true if a proxy in front of this server speaks TLS"),
        ({"keys": False}, "would let everyone who reaches this machine use the server"),
        ({"keys": False, "tls": CERTIFICATE}, "would let everyone"),
        ({"keys": False, "behind_proxy": True}, "would let everyone"),
    ):
        with pytest.raises(ConfigError, match=words):
            ServeConfig(model="m", host=host, **settings)
    for settings in ({"tls": CERTIFICATE}, {"behind_proxy": True}):
        assert ServeConfig(model="m", host=host, **settings).demands_keys


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.8.0.1"])
def test_a_local_bind_needs_no_keys_unless_a_proxy_is_in_front(host):
    assert not ServeConfig(model="m", host=host).demands_keys
    assert ServeConfig(model="m", host=host, keys=True).demands_keys
    assert ServeConfig(model="m", host=host, behind_proxy=True).demands_keys
    with pytest.raises(ConfigError, match="everyone who reaches the proxy"):
        ServeConfig(model="m", host=host, behind_proxy=True, keys=False)
    assert host == "localhost" or ipaddress.ip_address(host).is_loopback


def test_tls_ends_in_one_place():
    with pytest.raises(ConfigError, match="says that TLS ends at the proxy"):
        ServeConfig(model="m", behind_proxy=True, tls=CERTIFICATE)
