"""Hub ids end in a folder that loads, or in one line that says what to do.

Everything runs against a stand-in of the hub on this machine (tests/stand_in_hub.py), through the
real huggingface_hub.
"""

import errno
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import types
from pathlib import Path

import huggingface_hub
import jax
import numpy as np
import pytest
from huggingface_hub import constants
from safetensors.numpy import save

from dllm_jax import convert as checkpoints_convert
from dllm_jax import load
from dllm_jax.cli.entry import main
from dllm_jax.loading import hub as hubs
from dllm_jax.loading.load import LoadError
from dllm_jax.loading.sources import BUILTIN, find_tokenizer
from tests.golden.folders import GOLDEN, copy_golden, edit_config, read_tensors
from tests.oracles.checkpoints import write_adapter
from tests.stand_in_hub import COMMITS, Repository, serving

SHARDS = ["layer-a.safetensors", "layer-b.safetensors", "others.safetensors"]
SMALL = ["config.json", "model.safetensors.index.json"]
TOKENIZER = {"chat_template.jinja": b"{{ messages }}", "tokenizer_config.json": b"{}"}
UNWANTED = dict.fromkeys(
    (
        "README.md",
        "modeling_sdar.py",
        "picture.png",
        "pytorch_model.bin",
        "original/consolidated.00.pth",
        "original/layer-a.safetensors",
        "consolidated.safetensors",
        "training_args.pt",
    ),
    b"must not be asked for",
)
ADAPTER = {"adapter_config.json": b'{"r": 4}', "adapter_model.safetensors": b"weights"}
ENVIRONMENT = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_OIDC_RESOURCE")


def golden_files():
    names = [path for path in (GOLDEN / "sdar").iterdir() if path.suffix != ".npz"]
    return {path.name: path.read_bytes() for path in names}


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """An empty hub and an empty cache, as environment variables would set them."""
    with serving() as hub:
        home = tmp_path / "home"
        for name, value in {
            "ENDPOINT": hub.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": hub.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(home / "hub"),
            "HF_TOKEN_PATH": str(home / "token"),
            "HF_HUB_OFFLINE": False,
            "AGENT_HARNESSES_PATH": str(home / "harnesses.json"),
        }.items():
            monkeypatch.setattr(constants, name, value, raising=False)  # one is newer
        for name in ENVIRONMENT:
            monkeypatch.delenv(name, raising=False)
        no_pause = types.SimpleNamespace(sleep=lambda seconds: None)
        monkeypatch.setattr("huggingface_hub.file_download.time", no_pause)
        yield hub
    huggingface_hub.close_session()


@pytest.fixture
def model(hub):
    """`org/name`: a golden checkpoint in the middle of a real repository's other files."""
    hub.repositories["org/name"] = Repository({**golden_files(), **TOKENIZER, **UNWANTED})
    return hub


def fails(source, **kwargs):
    with pytest.raises(LoadError) as caught:
        load(source, **kwargs)
    text = str(caught.value)
    assert "\n" not in text
    return text


# What is fetched.


def test_a_model_loads_as_its_folder_does(model, tmp_path):
    fetched = load("org/name")
    local = load(copy_golden("sdar", tmp_path / "name"))
    assert fetched.source == "org/name"
    fetched = fetched.replace(source=local.source)
    assert jax.tree.structure(fetched) == jax.tree.structure(local)  # all but the weights
    jax.tree.map(np.testing.assert_array_equal, fetched, local)


def test_only_weights_config_and_tokenizer_are_asked_for(model):
    folder = hubs.fetch_model("org/name")
    wanted = sorted([*SHARDS, *SMALL, *TOKENIZER])
    assert model.files() == wanted
    assert set(model.files("HEAD")) == set(wanted)
    assert sorted(path.name for path in folder.iterdir()) == wanted
    assert all((folder / name).read_bytes() == golden_files()[name] for name in SHARDS)


def test_without_an_index_every_safetensors_file_is_fetched(hub, tmp_path):
    folder = copy_golden("sdar", tmp_path / "one", single=True)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    hub.repositories["org/one"] = Repository(files | {"original/model.safetensors": b"not this"})
    assert load("org/one").config.vocab_size == 96
    assert hub.files() == ["config.json", "model.safetensors"]


def test_a_second_load_fetches_nothing(model):
    load("org/name")
    model.requests.clear()
    load("org/name")
    assert {path.split("/")[1] for _, path, *_ in model.requests} == {"api"}


def test_a_connection_that_breaks_is_tried_again(model):
    model.cut = {"others.safetensors"}
    folder = hubs.fetch_model("org/name")
    assert (folder / "others.safetensors").read_bytes() == golden_files()["others.safetensors"]
    assert model.files().count("others.safetensors") == 2


def test_a_folder_of_that_name_wins(model, tmp_path, monkeypatch):
    copy_golden("qwen3", tmp_path / "org" / "name")
    monkeypatch.chdir(tmp_path)
    assert load("org/name").config == load(GOLDEN / "qwen3").config
    assert model.requests == []


# Which revision, for whom.


@pytest.mark.parametrize("revision", ["v1", COMMITS[0]])
def test_a_revision_is_pinned(hub, revision):
    files = golden_files()
    newer = json.loads(files["config.json"]) | {"rope_theta": 5.0}
    after = files | {"config.json": json.dumps(newer).encode()}
    hub.repositories["org/name"] = Repository(files, after, tags={"v1": 0})
    assert load("org/name", revision=revision).config.rope_theta == 1e6
    assert load("org/name").config.rope_theta == 5.0
    assert hub.files().count("others.safetensors") == 1  # the same in both


def test_a_token_of_the_environment_goes_with_every_request(model, monkeypatch):
    model.repositories["org/name"].token = "hf_secret"
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hubs.fetch_model("org/name")
    asked = [r for r in model.requests if "org/name" in r[1]]
    assert len(asked) > len(SHARDS)
    assert {authorization for _, _, authorization, _ in asked} == {"Bearer hf_secret"}


def test_a_stored_token_is_sent(model, tmp_path):
    model.repositories["org/name"].token = "hf_stored"
    (tmp_path / "home").mkdir(exist_ok=True)
    (tmp_path / "home" / "token").write_text("hf_stored")
    hubs.fetch_model("org/name")


# The cache where the hub does not answer.


def test_offline_mode_takes_the_cache_and_asks_nothing(model, monkeypatch):
    load("org/name")
    model.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert load("org/name").config.vocab_size == 96
    assert model.requests == []


@pytest.mark.parametrize("revision", [None, COMMITS[0]])
def test_a_hub_that_fails_leaves_the_cache(model, revision):
    hubs.fetch_model("org/name", revision)
    model.status = 503
    assert load("org/name", revision=revision).config.vocab_size == 96


@pytest.mark.parametrize("lost", ["others.safetensors", "config.json"])
def test_a_cache_that_is_not_whole_is_not_taken(model, monkeypatch, lost):
    (hubs.fetch_model("org/name") / lost).unlink()
    for listing in Path(constants.HF_HUB_CACHE).glob("*/trees"):
        shutil.rmtree(listing)  # as an older library leaves it
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "'org/name' is no folder here and not, or not whole, in the cache" in fails("org/name")


# What can go wrong, one line each.


def test_offline_mode_without_the_files_says_so(hub, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    text = fails("org/name", revision="v1")
    assert text.startswith("model 'org/name' at revision 'v1' is no folder here and not, or not wh")
    assert "HF_HUB_OFFLINE is set; unset it to download, or give a folder" in text
    assert hub.requests == []


def test_no_network_says_so(hub, monkeypatch):
    nobody = "http://127.0.0.1:9"
    monkeypatch.setattr(constants, "ENDPOINT", nobody)
    text = fails("org/name")
    assert f"'org/name' is no folder here and {nobody} cannot be reached (ConnectError: " in text
    assert "check the connection (HTTPS_PROXY, HF_ENDPOINT) and try again, or download it" in text


@pytest.mark.parametrize("token", [None, "hf_other"])
def test_an_unknown_or_private_repository_says_so(model, monkeypatch, token):
    model.repositories["org/name"].token = "hf_secret"
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
    for name in ("org/name", "org/nothing"):
        text = fails(name)
        assert f"{name!r} is no folder here and no repository at {model.url} that you may" in text
        assert "or log in where it is private (`hf auth login`, or a token in HF_TOKEN)" in text


def test_a_gated_repository_says_so(model):
    model.repositories["org/name"].gated = True
    text = fails("org/name")
    assert text.startswith("model 'org/name' is gated; accept its terms at")
    assert f"{model.url}/org/name and log in with that account (`hf auth login`" in text


def test_an_unknown_revision_says_so(model):
    text = fails("org/name", revision="v9")
    assert text.startswith("revision='v9' is no branch, tag or commit of 'org/name'; ")
    unknown = "9" * 40
    assert f"revision='{unknown}' is no branch" in fails("org/name", revision=unknown)


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (401, "refuses the token it was sent; log in anew (`hf auth login`), or correct or unset"),
        (503, "answers 503 (HfHubHTTPError: Server error '503 Service Unavailable'"),
        (429, "answers 429 "),
        (403, "forbids it to the token it was sent; give the token the right to read it"),
    ],
)
def test_a_hub_that_refuses_says_so(model, status, words):
    model.status = status
    model.message = "Invalid credentials in Authorization header" if status == 401 else ""
    assert f"model 'org/name': {model.url} {words}" in fails("org/name")


def test_a_name_the_hub_cannot_have_says_so(hub):
    assert "'a--b/c' is no folder here and no hub id (HFValidationError: " in fails("a--b/c")
    assert hub.requests == []


def test_a_repository_without_safetensors_says_so(hub):
    files = {"config.json": b"{}", "pytorch_model.bin": b"pickle"}
    hub.repositories["org/bin"] = Repository(files)
    assert fails("org/bin") == (
        "model 'org/bin' has no model.safetensors; only safetensors are read, other forms of "
        "weights can run code"
    )


def test_a_repository_without_config_says_so_before_its_weights_come(hub):
    hub.repositories["org/gguf"] = Repository({"model.safetensors": b"weights"})
    assert "'org/gguf' has no config.json; give a repository in the Hu" in fails("org/gguf")
    assert hub.files() == []


def test_a_repository_without_all_its_shards_says_so(hub):
    files = golden_files()
    del files["layer-b.safetensors"]
    hub.repositories["org/name"] = Repository(files)
    assert fails("org/name") == (
        "model 'org/name' has no layer-b.safetensors; model.safetensors.index.json names it: give "
        "a revision that is whole"
    )


def test_a_disk_too_small_says_so_before_the_weights_come(model, monkeypatch):
    usage = types.SimpleNamespace(free=10)
    monkeypatch.setattr(
        "dllm_jax.loading.hub.shutil", types.SimpleNamespace(disk_usage=lambda p: usage)
    )
    text = fails("org/name")
    assert "model 'org/name' needs 0.0 GB more in the cache" in text
    assert "free some, or set HF_HOME to a folder elsewhere" in text
    assert not set(model.files()) & {*SHARDS}


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        RuntimeError("I/O error: No space left on device (os error 28)"),  # hf_xet's
    ],
)
def test_a_disk_that_fills_up_says_so(model, monkeypatch, error):
    def full(*args, **kwargs):
        raise error

    monkeypatch.setattr("huggingface_hub.file_download.http_get", full)
    text = fails("org/name")
    assert text.startswith("model 'org/name': the disk of the cache ")
    assert text.endswith("is full; free some, or set HF_HOME to a folder elsewhere")


def test_a_cache_that_cannot_be_written_says_so(model, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "file" / "hub"))
    assert "file/hub' cannot be written (NotADirectoryError: " in fails("org/name")


# Adapters.


@pytest.fixture
def lora(model, tmp_path):
    """`org/lora`: an adapter for `org/name`, and its folder."""
    folder = write_adapter(copy_golden("sdar", tmp_path / "base"), tmp_path / "lora")
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    model.repositories["org/lora"] = Repository({**files, "README.md": b"", "run.py": b""})
    return folder


def test_an_adapter_is_fetched_and_merged(model, lora, tmp_path, capsys):
    fetched = load("org/name", lora="org/lora")
    assert sorted({*model.files()} - {*SHARDS, *SMALL, *TOKENIZER}) == sorted(ADAPTER)
    merged, _ = checkpoints_convert.load_params(GOLDEN / "sdar", "float32", lora=lora)
    jax.tree.map(np.testing.assert_array_equal, fetched.params, merged)
    for source in (GOLDEN / "sdar", "org/name"):
        again = load(source, lora=lora).params
        jax.tree.map(np.testing.assert_array_equal, again, merged)
    plain = load(GOLDEN / "sdar").params["layers"][0]["wqkv"]
    assert np.abs(plain - fetched.params["layers"][0]["wqkv"]).max() > 1e-3
    made = str(tmp_path / "converted")
    argv = ["--lora", "org/lora", "--dtype", "float32"]
    assert main(["convert", "org/name", made, *argv]) == 0
    jax.tree.map(np.testing.assert_array_equal, load(made).params, merged)
    capsys.readouterr()
    assert main(["inspect", "org/name", "--lora", "org/lora", "--json"]) == 0
    adapter = json.loads(capsys.readouterr().out)["adapter"]
    assert (adapter["rank"], adapter["alpha"]) == (4, 8)


def test_a_tokenizer_is_fetched_alone(model, monkeypatch):
    content = (BUILTIN / "tiny-sdar" / "tokenizer.json").read_bytes()
    files = {**golden_files(), **TOKENIZER, "tokenizer.json": content}
    model.repositories["org/words"] = Repository(files)
    folder = find_tokenizer("org/words")
    wanted = sorted([*TOKENIZER, "tokenizer.json"])
    assert model.files() == wanted
    words = "tokenizer 'org/name' has no tokenizer.json; give the repository of a fast tokenizer"
    with pytest.raises(LoadError, match=words):
        find_tokenizer("org/name")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert find_tokenizer("org/words") == folder


def test_an_adapter_that_is_none_says_so(model):
    files = {"adapter_config.json": b"{}", "adapter_model.bin": b"pickle"}
    model.repositories["org/bin"] = Repository(files)
    for lora, words in (
        ("org/name", "adapter 'org/name' has no adapter_config.json; give the repository of a"),
        ("org/bin", "adapter 'org/bin' has no adapter_model.safetensors; only safetensors are "),
        ("org/none", "adapter 'org/none' is no folder here and no repository"),
        (GOLDEN / "sdar", "sdar' holds no adapter_config.json; give the folder of a PEFT adapter"),
        ("", "lora='' holds no adapter_config.json"),
    ):
        assert words in fails("org/name", lora=lora)
    assert not set(model.files()) & {*SHARDS}


def test_an_adapter_in_the_place_of_a_model_says_so(hub, tmp_path):
    hub.repositories["org/lora"] = Repository(ADAPTER)
    (tmp_path / "adapter_config.json").write_text("{}")
    for source in ("org/lora", str(tmp_path)):
        words = f"model {source!r} is a LoRA adapter; give its base model, and this as lora"
        assert words in fails(source)


# The command line.


def test_the_flags_reach_the_loader(model, capsys, monkeypatch):
    def stop(*given, **_):
        raise ValueError(f"given {given[:4]}")

    monkeypatch.setattr("dllm_jax.load", stop)
    flags = ["--model", "org/name", "--revision", "v1", "--lora", "org/lora", "--dtype", "float32"]
    for verb in (["generate", "x"], ["chat"], ["eval"], ["bench", "latency"]):
        assert main([*verb, *flags]) == 1
        reported = "error: given ('org/name', 'float32', 'v1', 'org/lora') ("
        assert capsys.readouterr().err.startswith(reported)  # then the line of this file


def test_inspect_reads_headers_and_leaves_the_weights(hub, capsys, tmp_path):
    folder = copy_golden("sdar", tmp_path / "big", single=True)
    edit_config(folder, block_size=...)
    tensors = read_tensors(folder)
    weights = (folder / "model.safetensors").read_bytes()
    gap = np.zeros((1 << 23, 4), np.float32)  # 128 MiB, far more than sockets hold
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    hub.repositories["org/Big-b8"] = Repository(
        files | {"model.safetensors": save({**tensors, "surplus": gap})}
    )
    assert main(["inspect", "org/Big-b8", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["source"] == "org/Big-b8"
    assert report["num_bytes"] > gap.nbytes + len(weights) - 1000
    assert report["num_tensors"] == len(tensors) + 1
    assert report["defaults"]["block_size"] == 8
    assert hub.sent < 32 << 20


def test_inspect_of_fetched_files_and_convert_take_hub_ids(model, capsys, tmp_path):
    made = str(tmp_path / "converted")
    argv = ["--revision", COMMITS[0], "--dtype", "float32"]
    assert main(["convert", "org/name", made, *argv, "--dry-run"]) == 0
    assert not [*Path(constants.HF_HUB_CACHE).rglob("*.safetensors")]
    assert main(["convert", "org/name", made, *argv]) == 0
    jax.tree.map(np.testing.assert_array_equal, load(made).params, load(GOLDEN / "sdar").params)
    model.sent = 0
    capsys.readouterr()
    assert main(["inspect", "org/name"]) == 0
    assert "source      org/name (Hugging Face folder)" in capsys.readouterr().out
    assert model.sent < 10_000  # answers of the API


# What a terminal shows, and Ctrl-C.


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_shows_one_bar_of_all_bytes(model, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    hubs.fetch_model("org/name")
    shown = sys.stderr.getvalue()
    assert "fetching org/name:   0%" in shown
    assert "/121k [" in shown  # the three shards
    assert len({line.split(":")[0] for line in shown.split("\r") if line.strip()}) == 1


def test_a_bar_counts_each_byte_once(hub, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    with hubs._bar("org/name", 150) as shown:
        for done in (100, 150):
            counter = hubs._counter(shown)
            come, written, files = counter(unit="B", total=0), counter(unit="B"), counter(total=3)
            size = done - shown.n
            for bar, count in (
                *((come, size - 20), (files, 1), (written, size // 2), (written, size // 2)),
                (come, 10),
            ):
                bar.update(count)
            assert shown.n == done


def test_a_pipe_shows_nothing(model, capfd):
    model.cut = {"others.safetensors"}  # of which the library would tell
    hubs.fetch_model("org/name")
    with pytest.raises(LoadError):
        hubs.fetch_model("org/nothing")
    assert capfd.readouterr() == ("", "")


@pytest.mark.long
def test_ctrl_c_ends_at_once_and_the_next_run_goes_on(model, tmp_path):
    """Environment variables as users set them: HF_ENDPOINT, HF_HOME, HF_TOKEN, HF_HUB_OFFLINE."""
    model.repositories["org/name"].token = "hf_secret"
    model.slow = {"layer-b.safetensors"}
    home = tmp_path / "another"
    environment = os.environ | {"HF_ENDPOINT": model.url, "HF_HOME": str(home)}
    command = [
        sys.executable,
        "-c",
        "from dllm_jax.loading import hub; hub.fetch_model('org/name')",
    ]

    def start(**more):
        return subprocess.Popen(command, env=environment | more, stderr=subprocess.PIPE, text=True)

    process = start(HF_TOKEN="hf_secret")
    assert model.is_dripping.wait(120)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=120)[1].splitlines()[-1] == "KeyboardInterrupt"
    assert not [path for path in home.rglob("*") if "incomplete" in path.name]
    model.slow = set()
    model.requests.clear()
    (home / "token").write_text("hf_secret")  # as `hf auth login` leaves it
    assert start().communicate(timeout=120)[1] == ""
    assert "layer-b.safetensors" in model.files()
    assert not {*SMALL} & {*model.files()}
    model.requests.clear()
    process = start(HF_HUB_OFFLINE="1")
    assert (process.communicate(timeout=120)[1], process.returncode) == ("", 0)
    assert model.requests == []
