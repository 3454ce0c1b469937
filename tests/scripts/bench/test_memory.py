"""`jaxlora bench memory`."""

from jaxlora.bench.memory import SHOWN, main


def test_a_small_model_fits_everywhere(capsys):
    main(["--models", "tiny"])
    header, _, row = capsys.readouterr().out.splitlines()
    assert all(gpu.kind in header for gpu in SHOWN)
    assert row.count("none, 16,384, ") == len(SHOWN)
