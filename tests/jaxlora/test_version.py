"""A checkout that is not installed says so."""

import importlib.metadata
import pathlib
import runpy
import tomllib

import pytest
import yaml

import jaxlora

PACKAGE = pathlib.Path(jaxlora.__file__).parent


def test_a_checkout_that_is_not_installed(monkeypatch):
    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(
        ImportError, match=r"jaxlora is not installed.*pip install -e ."
    ) as caught:
        runpy.run_path(str(PACKAGE / "_version.py"))
    assert str(PACKAGE.parent) in str(caught.value)
    assert caught.value.__suppress_context__


def test_the_version_is_imported_first():
    """Else a checkout without its dependencies would tell of those, one by one."""
    lines = (PACKAGE / "__init__.py").read_text(encoding="utf-8").splitlines()
    imports = [line for line in lines if line.startswith(("import ", "from "))]
    assert imports[0] == "from jaxlora._version import __version__ as __version__"


def test_the_citation_has_the_version():
    root = pathlib.Path(__file__).parents[2]
    citation = yaml.safe_load((root / "CITATION.cff").read_text())
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    assert citation["version"] == project["version"]
    assert citation["license"] == project["license"]
    required = {"cff-version", "message", "title", "authors"}
    assert required <= citation.keys() and citation["authors"][0]["name"]
