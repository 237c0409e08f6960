"""Settings every test runs under: strict dtypes and ranks, the CPU unless `-m gpu` is asked for.

Fixtures shared by several files are here; oracles live in tests/oracles/.
"""

import functools
import gc
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

ROOT = Path(__file__).resolve().parent.parent

# The reproducible profile of `make test`; `--hypothesis-profile=explore` draws anew each time. How
# long anything takes is no failure: after hundreds of tests a first draw took 42 s once.
ANY_SPEED = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("repeatable", derandomize=True, database=None, **ANY_SPEED)
hypothesis.settings.register_profile("explore", print_blob=True, **ANY_SPEED)
hypothesis.settings.load_profile("repeatable")


# The tests compile far more than they run: leave LLVM's optimisations out, a quarter of it. A run
# without the slow tests also takes XLA's older emitters of kernels (no MLIR for each of some 300
# in a program) and makes one module of a program: a quarter of what is left. `make test-all` takes
# the emitters that users have, and so does test_the_command_decodes_as_here_with_users_settings.
# A CPU counts as eight devices, of which all but the tests of several devices use the first.
UNOPTIMISED = "--xla_backend_optimization_level=0 --xla_force_host_platform_device_count=8"
FAST = " ".join(
    (
        UNOPTIMISED,
        "--xla_cpu_parallel_codegen_split_count=1",
        "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
    )
)


def pytest_configure(config: pytest.Config) -> None:
    """Set JAX up before any test module imports it."""
    # A shell starts what runs in its background deaf to Ctrl-C, and children inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    marks = config.getoption("-m") or ""
    if "gpu" not in marks or "not gpu" in marks:
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ.setdefault("XLA_FLAGS", FAST if "not slow" in marks else UNOPTIMISED)
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
    if config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput"):
        return  # its workers run the tests
    gc.disable()  # what collection makes, it keeps

    import jax

    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    # Most of a first run is compiling; programs are kept in the clone for the next one and shared
    # between workers. The key holds the program, the versions and the flags.
    jax.config.update("jax_compilation_cache_dir", str(ROOT / ".cache" / "jax"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)

    from dllm_jax.loading.jax_settings import enable_async_dispatch

    enable_async_dispatch()  # as `load` does, but tests touch the device before they call it


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """End a worker that has said all: to free its thousands of programs took 7 to 11 s."""
    if hasattr(config, "workerinput"):
        os._exit(0)


@functools.cache
def _kernels_changed() -> bool:
    """Whether pallas_kernels/ changed since the last commit but one."""
    command = ["git", "diff", "--quiet", "HEAD~1", "--", "pallas_kernels"]
    return subprocess.run(command, cwd=ROOT, capture_output=True).returncode == 1


def _of_changed_kernels(path: Path) -> bool:
    return path.parent.name == "kernels" and _kernels_changed()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import files of which `-m` selects no test."""
    marks = config.getoption("-m") or ""
    if collection_path.suffix != ".py" or not collection_path.name.startswith("test_"):
        return None
    text = collection_path.read_text(encoding="utf-8")
    if "not long" in marks:
        is_long = re.search(r"^pytestmark = (\[\s*)?pytest\.mark\.long\b", text, re.MULTILINE)
        others = is_long and not _of_changed_kernels(collection_path)
    else:
        wanted = re.match("long|versions", marks)
        others = wanted and f"mark.{wanted[0]}" not in text
    return True if others else None


def pytest_collection_finish() -> None:
    """Collect garbage again, but not among the tests and modules that stay."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Take off the marks that do not hold: of other parameters, and of kernels that changed.

    `@pytest.mark.long("8-4|True")` is for parameters whose id this expression finds, and
    `@pytest.mark.slow(unless="pallas_kernels")` holds where that folder did not change, as do all
    long tests of kernels.
    """
    for item in items:
        changed = _of_changed_kernels(item.path)
        for node in item.listchain():
            node.own_markers = [m for m in node.own_markers if _holds(m, item, changed)]


def _holds(mark: pytest.Mark, item: pytest.Item, changed: bool) -> bool:
    if mark.name not in ("long", "slow", "versions"):
        return True
    if changed and (mark.name == "long" or "unless" in mark.kwargs):
        return False
    return not mark.args or re.search(mark.args[0], item.callspec.id) is not None


# Every program that XLA compiles for a CPU maps its kernels into memory, and Linux ends a process
# that maps more than vm.max_map_count areas, 65,530 by default: as a segmentation fault or an abort
# somewhere in XLA. A warmed engine takes some 3,000. Engines that a module shares stay compiled if
# they can, so within one the limit is higher.
MOST_MAPS, MOST_MAPS_INSIDE = 30_000, 45_000


def _let_programs_go(most: int) -> None:
    """Where a worker holds many compiled programs; the next reads them from the cache."""
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > most:
        import jax

        gc.unfreeze()
        jax.clear_caches()
        gc.collect()


@pytest.fixture(autouse=True, scope="module")
def _programs_of_a_module_go() -> Iterator[None]:
    yield
    _let_programs_go(MOST_MAPS)
    # JAX keeps what it traced: gigabytes, in the end. An engine collects garbage as it starts, and
    # a fifth of a worker's time went into looking at all of that again.
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _programs_of_slow_tests_go(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if request.node.get_closest_marker("slow"):
        _let_programs_go(MOST_MAPS_INSIDE)


@pytest.fixture(scope="session")
def random_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder of the built-in model's kind: random weights, a real tokenizer.

    Two layers, blocks of 8, window of 2 blocks, 256 positions: small enough to compile at once.
    """
    import jax

    from dllm_jax.convert import export_hf
    from dllm_jax.models.dense import DenseConfig, init_params
    from dllm_jax.tasks import problems as data
    from dllm_jax.training.tokenizer import EOS_ID, MASK_ID, PAD_ID, save_tokenizer, train_tokenizer

    folder = tmp_path_factory.mktemp("models") / "random-sdar"
    cfg = DenseConfig(
        vocab_size=512,
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        ffn_size=128,
        max_position=256,
        mask_token_id=MASK_ID,
    )
    problems = [data.problem("plain", 0, index) for index in range(300)]
    tokenizer = train_tokenizer((p.question + p.response for p in problems), cfg.vocab_size)
    save_tokenizer(tokenizer, folder, cfg.max_position)
    settings = {"strategy": "multi_bd", "block_size": 8, "buffer_size": 2, "accept_threshold": 0.9}
    params = init_params(jax.random.key(0), cfg, "float32")
    extra = {"eos_token_id": EOS_ID, "pad_token_id": PAD_ID, "dllm_jax": settings}
    return export_hf(params, cfg, folder, "float32", extra_config=extra)


@pytest.fixture(scope="session")
def model(random_folder):
    """The model of `random_folder`, where a file has no `model` of its own."""
    import dllm_jax as dj

    return dj.load(random_folder)


@pytest.fixture
def no_compile_cache(monkeypatch):
    """Commands and engines keep no compiled programs."""
    for place in ("loading.jax_settings", "api.llm"):
        monkeypatch.setattr(f"dllm_jax.{place}.enable_compile_cache", lambda: None)


@pytest.fixture
def fails(capsys):
    """Run a command that must fail with a status; returns its one line of error."""
    from dllm_jax.cli import main

    def run(status, *argv: str) -> str:
        assert main(list(argv)) in (status if isinstance(status, tuple) else (status,))
        captured = capsys.readouterr()
        assert captured.out == ""
        lines = captured.err.splitlines()
        errors = [line for line in lines if line.startswith("error: ")]
        assert lines == errors, "something besides the error line was written"
        assert len(errors) == 1
        return errors[0].removeprefix("error: ")

    return run


@pytest.fixture
def highest_precision():
    """Products in float32, as the oracles have them."""
    import jax

    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture
def on_hopper(monkeypatch):
    """Tracing and lowering as on a Hopper GPU."""
    import jax

    class Device:
        compute_capability = "9.0"

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda *_: [Device()])


@pytest.fixture
def compilations():
    """Names of what is compiled, or read from the compilation cache, from now on."""
    import jax.monitoring

    names = []

    def listen(event: str, duration: float, **facts: str | int) -> None:
        if event.endswith("/backend_compile_duration"):
            names.append(facts.get("fun_name"))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    jax.monitoring.unregister_event_duration_listener(listen)
