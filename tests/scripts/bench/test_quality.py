"""What settings are worth, by hand and on 208 recorded configurations."""

import json
import pathlib

from scripts.bench import __main__ as bench
from scripts.bench.quality import batch_rows, read, setting_rows, spread_rows

CURVES = pathlib.Path(__file__).parent / "curves" / "curves_smollm2.json"


def test_what_settings_are_worth(tmp_path):
    """Two batch sizes, which have seen as many samples at 20 and 10 steps."""
    points, names = [0, 10, 20], ["batch_size", "learning_rate"]
    rows = [(1, 2e-4, [9, 5, 4]), (1, 5e-3, [9, 6, 3]), (2, 2e-2, [9, 4.5, 1])]
    found = [{"settings": [b, r], "losses": losses} for b, r, losses in rows]
    found.append({"settings": [2, 1e-3], "losses": [9]})  # it ended early
    path = tmp_path / "curves.json"
    recorded = {"points": points, "settings": names, "configurations": found}
    path.write_text(json.dumps(recorded))
    given = read(path)
    assert [row["over_best"] for row in spread_rows(*given)] == [8, 3, 3, 2, 0]
    batch, rate = setting_rows(*given)
    assert (rate["best_value"], rate["spread"]) == ("1e-2", 3)
    assert (batch["best_value"], batch["spread"]) == (2, 2)
    assert [tuple(row.values()) for row in batch_rows(*given)] == [
        (1, 2, 3, 3),
        (2, 1, 1, 4.5),
    ]


def test_the_recorded_configurations(capsys):
    """The tables are those of docs/howto/sweep.md."""
    found = json.loads(CURVES.read_text())
    assert found["about"]["model"] == "smollm2-135m"
    assert len(read(CURVES)[1]) == len(found["configurations"]) == 208
    bench.run("quality", [str(CURVES)])
    assert "| best | 4." in capsys.readouterr().out
