from scripts import arrows


def test_the_page_shows_the_present_arrows():
    page = arrows.PAGE.read_text(encoding="utf-8")
    assert arrows.updated(page) == page, "run `python -m scripts.arrows --update`"


def test_layers_without_arrows_that_follow_from_others():
    graph = {
        "cli.py": {"train/", "errors.py", "config.py"},
        "train/": {"models/", "config.py", "errors.py"},
        "models/": {"modules/"},
        "modules/": {"models/", "errors.py"},
        "config.py": {"errors.py"},
        "errors.py": set(),
        "leaf/": set(),
    }
    assert arrows.picture(graph).splitlines()[1:] == [
        "    3  cli.py                    -> train/",
        "    2  train/                    -> config.py, models/ <-> modules/",
        "    1  config.py, models/ <-> modules/  -> errors.py",
        "    0  errors.py, leaf/",
    ]


def test_links_are_parts_of_jaxlora():
    files = arrows.find_modules()
    assert files["jaxlora.scheduler.types"] == arrows.ROOT / "scheduler" / "types.py"
    assert "jaxlora.profile.measure" in files and "scripts.arrows" in files
    assert not [m for m in files if m.startswith(("scheduler", "jaxlora.scripts"))]
    assert len(set(files.values())) == len(files)


def test_imports_of_modules_and_of_their_members(tmp_path):
    (tmp_path / "a.py").write_text(
        "import p.b\nfrom p import c\ndef f():\n    from p.d import member\n"
    )
    files = {"p.a": tmp_path / "a.py"}
    for name in ("p", "p.b", "p.c", "p.d", "p.e"):
        files[name] = tmp_path / "empty.py"
    (tmp_path / "empty.py").touch()
    assert arrows.module_graph(files)["p.a"] == {"p.b", "p.c", "p.d"}
