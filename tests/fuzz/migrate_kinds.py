"""Kinds of inputs: files of other tools, which become run files."""

import json
import pathlib
import random

from jaxlora.common.yaml_file import parse_yaml
from jaxlora.config.run_file import load_run
from jaxlora.migrate import migrate_file
from jaxlora.printable import has_invisible
from tests.fuzz.kind import Kind
from tests.fuzz.mutate import Damage, damage_bytes, damage_value, to_json

EXAMPLES = pathlib.Path(__file__).parents[1] / "jaxlora/migrate/examples"
FILES = sorted({p.name for p in EXAMPLES.iterdir() if not p.match("*.run.yaml")})
_FORGED = ("\nmodel: forged", "\r", "\x85", "\u2028", "\x1b[2J", "\u202e", "\ud800")


def make_files(folder: pathlib.Path) -> None:
    for name in FILES:
        settings = parse_yaml((EXAMPLES / name).read_text(), name)
        (folder / name).write_text(json.dumps(settings))


def damage_settings(content: bytes, rng: random.Random) -> Damage:
    """Changes bytes, a value, or a key."""
    if rng.random() < 0.2:
        return damage_bytes(content, rng)
    settings = json.loads(content)
    if rng.random() < 0.3:
        key, mark = rng.choice(list(settings)), rng.choice(_FORGED)
        settings[f"{key}{mark}"] = settings[key]
        return f"a key {key}{mark!r}", json.dumps(settings).encode()
    what, value = damage_value(settings, rng)
    return what, to_json(value)  # which is YAML


def read_files(folder: pathlib.Path) -> None:
    """Converts each; the run file holds the settings, and a safe comment."""
    for name in FILES:
        migration = migrate_file(folder / name)
        text = migration.text(name)
        (folder / "run.out").write_text(text)
        kept = parse_yaml(text, "run.out")
        assert kept == json.loads(json.dumps(migration.run_file)), name
        assert not has_invisible(text.replace("\n", "").replace("\t", "")), name
        load_run(folder / "run.out")


KINDS = {
    "migrate": Kind(
        make=make_files,
        targets=tuple(FILES),
        damage=damage_settings,
        read=read_files,
        num_cases=120,
        # As a run file, such a file may come through a pipe.
        entries=("folder", "missing", "loop", "dangling"),
    )
}
