"""Errors for paths without a checkpoint say what is there, and what to do."""

import json
from pathlib import Path

import pytest

from orca_jax.errors import CheckpointError, NotACheckpoint, UnsafeFile, UnsupportedModel
from orca_jax.families.trainers.orca_json import described_model
from orca_jax.model_files.found_model import DEMO_MODEL
from orca_jax.model_files.locate import find_directory
from orca_jax.model_files.weight_files import find_weight_files


def made(folder: Path, *names: str) -> Path:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"{}" if path.suffix == ".json" else b"")
    return folder


@pytest.mark.parametrize(
    ("names", "error", "words"),
    [
        ((), NotACheckpoint, ["it is empty"]),
        (("notes.txt",), NotACheckpoint, ["it holds notes.txt"]),
        (
            ("tokenizer.json", "tokenizer_config.json"),
            NotACheckpoint,
            ["only a tokenizer", "name the directory"],
        ),
        (
            ("llama-q4.gguf", "llama-q8.gguf", "README.md"),
            NotACheckpoint,
            ["has 2 GGUF files (llama-q4.gguf, llama-q8.gguf)", "name one of them"],
        ),
        (
            ("pytorch_model.bin", "tokenizer.json"),
            UnsafeFile,
            ["pytorch_model.bin is a pickle", "save_pretrained"],
        ),
        (("params.json", "consolidated.00.pth"), UnsupportedModel, ["consolidated", "for transformers"]),
        (("params.json", "consolidated.safetensors"), UnsupportedModel, ["consolidated", "for transformers"]),
        (("model_index.json", "unet/config.json"), UnsupportedModel, ["diffusers", "language models"]),
        (("model.onnx", "tokenizer.json"), UnsupportedModel, ["an ONNX model", "safetensors"]),
        (("tf_model.h5",), UnsupportedModel, ["TensorFlow"]),
        (("flax_model.msgpack",), UnsupportedModel, ["Flax"]),
        (("model.safetensors",), NotACheckpoint, ["has weights (model.safetensors)", "copy config.json"]),
        (("one/config.json", "other/x.txt"), NotACheckpoint, ["one: name it"]),
        (("a/config.json", "b/orca.json"), NotACheckpoint, ["/a, ", "/b: name one of them"]),
    ],
)
def test_a_directory_says_what_it_is(
    tmp_path: Path, names: tuple[str, ...], error: type[CheckpointError], words: list[str]
) -> None:
    made(tmp_path, *names)
    with pytest.raises(error) as raised:
        find_directory(tmp_path)
    message = str(raised.value)
    assert str(tmp_path) in message and message.isprintable()
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (("model.gguf",), "model.gguf"),
        (("MODEL.GGUF", "README.md"), "MODEL.GGUF"),
        (("config.json", "tokenizer.json", "m.Q4_K_M.gguf"), "m.Q4_K_M.gguf"),
        (("gemma.gguf", "mmproj-gemma-f16.gguf", "gemma.imatrix.gguf"), "gemma.gguf"),
        (("m-00002-of-00002.gguf", "m-00001-of-00002.gguf"), "m-00001-of-00002.gguf"),
        (("config.json", "model.safetensors", "model.gguf"), ""),
    ],
)
def test_a_directory_with_the_weights_of_one_gguf_file(
    tmp_path: Path, names: tuple[str, ...], found: str
) -> None:
    made(tmp_path, *names)
    assert find_directory(tmp_path) == tmp_path / found
    for name in names:
        if name == found:
            assert find_directory(tmp_path / name) == tmp_path / name


def test_a_gguf_file_of_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = ["README.md", "small-Q4_K_M.gguf", "small-Q8_0.gguf", "mmproj-small.gguf"]
    fetched: list[str] = []

    def download(_: str, name: str) -> str:
        fetched.append(name)
        return str(made(tmp_path, name) / name)

    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(tmp_path))
    monkeypatch.setattr("huggingface_hub.list_repo_files", lambda _: files)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    with pytest.raises(NotACheckpoint, match=r"2 GGUF files \(small-Q4_K_M.gguf, small-Q8_0.gguf\).*Q4_K_M"):
        find_directory("org/small-GGUF")
    assert find_directory("org/small-GGUF:q8_0") == tmp_path / "small-Q8_0.gguf"
    assert find_directory("org/small-GGUF/small-Q4_K_M.gguf") == tmp_path / "small-Q4_K_M.gguf"
    with pytest.raises(NotACheckpoint, match=r"its GGUF files are small-Q4_K_M.gguf, small-Q8_0.gguf"):
        find_directory("org/small-GGUF:Q5_K")
    assert fetched == ["small-Q8_0.gguf", "small-Q4_K_M.gguf"]


def test_the_only_gguf_file_of_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(tmp_path, "config.json")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(tmp_path))
    monkeypatch.setattr("huggingface_hub.list_repo_files", lambda _: ["config.json", "small.gguf"])
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda _, name: str(made(tmp_path, name) / name))
    assert find_directory("org/small") == tmp_path / "small.gguf"


def test_an_adapter_names_its_model(tmp_path: Path) -> None:
    made(tmp_path, "adapter_config.json", "adapter_model.safetensors", "tokenizer.json")
    with pytest.raises(
        UnsupportedModel, match=r"is an adapter \(LoRA\), not a whole model.*merge_and_unload"
    ):
        find_directory(tmp_path)
    base = {"base_model_name_or_path": "org/base-7b", "peft_type": "LORA"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(base), encoding="utf-8")
    with pytest.raises(UnsupportedModel, match=r"is an adapter \(LoRA\) of org/base-7b, not"):
        find_directory(tmp_path)
    (tmp_path / "adapter_config.json").write_bytes(b"\xff")
    with pytest.raises(UnsupportedModel, match=r"is an adapter \(LoRA\), not a whole model"):
        find_directory(tmp_path)


def test_an_adapter_with_its_models_config(tmp_path: Path) -> None:
    """Trainers of transformers save a config.json with an adapter too."""
    made(tmp_path, "config.json", "adapter_config.json", "adapter_model.safetensors")
    assert find_directory(tmp_path) == tmp_path  # the config is read first, and may be wrong itself
    with pytest.raises(UnsupportedModel, match="is an adapter"):
        find_weight_files(tmp_path)


def test_a_trainers_folder_names_its_last_step_first(tmp_path: Path) -> None:
    made(tmp_path, *(f"checkpoint-{n}/config.json" for n in (90, 500, 1000)), "trainer_state.json")
    with pytest.raises(NotACheckpoint, match=r"checkpoint-1000, \S+-500, \S+-90: name one"):
        find_directory(tmp_path)


def test_a_folder_of_the_hubs_cache(tmp_path: Path) -> None:
    folder = tmp_path / "models--org--name"
    made(folder, "refs/main", "blobs/ab", "snapshots/0123abcd/config.json")
    with pytest.raises(NotACheckpoint, match=r"snapshots/0123abcd: name it"):
        find_directory(folder)


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("model.pt", UnsafeFile, "pickle"),
        ("model.zip", NotACheckpoint, "unpack it"),
        ("model.tar.gz", NotACheckpoint, "unpack it"),
        ("model.onnx", UnsupportedModel, "ONNX"),
        ("notes.txt", NotACheckpoint, "is a file; name the directory that holds config.json"),
    ],
)
def test_a_file_says_what_it_is(tmp_path: Path, name: str, error: type[CheckpointError], words: str) -> None:
    made(tmp_path, name)
    with pytest.raises(error, match=words):
        find_directory(tmp_path / name)


def test_a_checkpoints_file_names_its_directory(tmp_path: Path) -> None:
    made(tmp_path, "config.json", "model.safetensors")
    for name in ("config.json", "model.safetensors"):
        with pytest.raises(NotACheckpoint, match=f"{name} is a file; name its directory, {tmp_path}$"):
            find_directory(tmp_path / name)


@pytest.mark.parametrize(
    ("names", "error", "words"),
    [
        ((), NotACheckpoint, "the weights are missing.*--load-format dummy"),
        (("pytorch_model.bin",), UnsafeFile, "pickle"),
        (("training_args.bin",), NotACheckpoint, "the weights are missing"),
        (("model-00001-of-00002.safetensors",), NotACheckpoint, "no index"),
    ],
)
def test_a_config_without_weights(
    tmp_path: Path, names: tuple[str, ...], error: type[CheckpointError], words: str
) -> None:
    made(tmp_path, "config.json", *names)
    assert find_directory(tmp_path) == tmp_path
    with pytest.raises(error, match=words):
        find_weight_files(tmp_path)


def test_an_index_without_its_file(tmp_path: Path) -> None:
    index = {
        "weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-2.safetensors"}
    }
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    made(tmp_path, "model-1.safetensors")
    with pytest.raises(NotACheckpoint, match=r"model-2\.safetensors is missing.*2 tensors.*run it again"):
        find_weight_files(tmp_path)


def test_a_checkpoint_is_found() -> None:
    assert find_directory(DEMO_MODEL) == DEMO_MODEL
    assert [path.name for path in find_weight_files(DEMO_MODEL).paths] == ["model.safetensors"]


def test_an_orbax_step_that_nothing_describes(tmp_path: Path) -> None:
    made(tmp_path, "_METADATA", "manifest.ocdbt")
    assert find_directory(tmp_path) == tmp_path
    with pytest.raises(NotACheckpoint, match=r"neither orca\.json nor config\.json.*write one"):
        described_model(tmp_path)
    run = tmp_path / "run"
    made(run, "config.json", "40/default/_METADATA")
    with pytest.raises(NotACheckpoint, match=f"name {run}, which has one"):
        described_model(run / "40" / "default")


def test_a_misspelled_directory_is_suggested(tmp_path: Path) -> None:
    made(tmp_path, "llama-3b/config.json", "phi/config.json")
    with pytest.raises(
        NotACheckpoint, match=rf"there is no directory \S+ \(did you mean {tmp_path}/llama-3b"
    ):
        find_directory(tmp_path / "lama-3b")
    with pytest.raises(NotACheckpoint, match=r"there is no directory \S+/nothing-alike$"):
        find_directory(tmp_path / "nothing-alike")
