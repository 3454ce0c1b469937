"""Converts settings of other tools."""

import pytest

from jaxlora.config.run_file import load_run
from jaxlora.migrate import migrate_file


@pytest.fixture
def migrated(tmp_path):
    """Converts a file and reads the result as a run file; returns both."""

    def convert(text: str):
        (tmp_path / "other.yml").write_text(text)
        migration = migrate_file(tmp_path / "other.yml")
        (tmp_path / "run.yaml").write_text(migration.text("other.yml"))
        return migration, load_run(tmp_path / "run.yaml")

    return convert
