"""Lines for the log that hold for several jobs."""

from jaxlora.common.note import Note, log_notes


def test_what_holds_for_several_jobs_is_one_line(caplog):
    caplog.set_level("INFO", "jaxlora")
    jobs = "abcdef"
    notes = [Note("mesh stage=2")]
    for job in jobs:
        notes += [Note("training data x", job=job), Note(f"rank {job > 'b'}", job=job)]
    log_notes([*notes, Note("training data x", is_warning=True, job="a")])
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        ("INFO", "mesh stage=2"),
        ("INFO", "a, b, c and 3 more: training data x"),
        ("INFO", "a, b: rank False"),
        ("INFO", "c, d, e, f: rank True"),
        ("WARNING", "a: training data x"),
    ]
