"""`jaxlora bench memory`."""

from jaxlora.bench.memory import GPUS, main


def test_a_small_model_fits_everywhere(capsys):
    main(["--models", "tiny"])
    header, _, row = capsys.readouterr().out.splitlines()
    assert all(gpu.name in header for gpu in GPUS)
    assert row.count("none, 16,384, ") == len(GPUS)
