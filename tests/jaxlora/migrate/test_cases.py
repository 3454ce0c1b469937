"""Settings of other tools become those of a run, or are refused: `cases.yaml`."""

import json
import pathlib

import pytest

from jaxlora.common.yaml_file import parse_yaml
from jaxlora.config.run_file import load_run
from jaxlora.errors import ConfigError
from jaxlora.migrate import migrate_file

HERE = pathlib.Path(__file__).parent
GROUPS = parse_yaml((HERE / "cases.yaml").read_text(), "cases.yaml")
# What is said about every file of these tools.
ALWAYS = ("batch_size", "warmup_ratio", "target_modules", "data.loss_on", "Means of")


def cases():
    for name, group in GROUPS.items():
        for given, wanted, *said in group["rows"]:
            text = json.dumps(given)
            values = (group["base"] | given, group.get("info"), wanted, *said)
            yield pytest.param(*values, *[""] * (4 - len(values)), id=f"{name}: {text}")


@pytest.mark.parametrize(("given", "info", "wanted", "said"), [*cases()])
def test_case(tmp_path, monkeypatch, given, info, wanted, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other.json").write_text(json.dumps(given))
    if info is not None:
        (tmp_path / "info").mkdir()
        (tmp_path / "info/dataset_info.json").write_text(json.dumps(info))
    if wanted is None:
        with pytest.raises(ConfigError) as refused:
            migrate_file("other.json")
        assert said in str(refused.value)
        return
    migration = migrate_file("other.json")
    text = migration.text("other.json")
    (tmp_path / "run.yaml").write_text(text)
    run = load_run(tmp_path / "run.yaml")
    values = run.model_dump(mode="json") | run.jobs[0].model_dump(mode="json")
    for key in ("data", "eval_data"):  # where defaults say nothing
        if (data := getattr(run.jobs[0], key)) is not None:
            values[key] = data.model_dump(mode="json", exclude_defaults=True)
    assert {key: values[key] for key in wanted} == wanted
    assert said in text
    told = [f"{key}: {reason}" for key, reason in migration.left_out.items()]
    assert not told or (said and any(said in line for line in told))
    if not said and "data" in wanted:
        assert all(line.startswith(ALWAYS) for line in migration.to_do)
