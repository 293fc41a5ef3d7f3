"""The built package, installed into fresh environments."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
TRAINED = REPOSITORY / "fixtures" / "z3_w2_bf16" / "ckpt"
NBYTES_MAX = 150_000_000
LIMIT_S = 600

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * LIMIT_S)]


def ran(*words: object, status: int = 0, **environment: str) -> str:
    """Run a command, check its exit status and return what it printed."""
    inherited = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in words],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        cwd="/",
        env=inherited | environment,
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


class Environment:
    """A virtual environment with its own cache."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        ran(sys.executable, "-m", "venv", "--without-pip", folder)

    def install(self, *what: object) -> None:
        ran(*self._pip, "install", "--quiet", "--no-compile", *what)

    @property
    def _pip(self) -> tuple[object, ...]:
        """The pip of this environment, which installs faster than one of the folder's own."""
        return (sys.executable, "-m", "pip", "--python", self._folder / "bin" / "python")

    @property
    def packages(self) -> Mapping[str, str]:
        """Installed packages and their versions."""
        frozen = ran(*self._pip, "list", "--format", "freeze")
        pairs = (line.split("==") for line in frozen.splitlines() if "==" in line)
        return {pair[0].lower().replace("-", "_"): pair[1] for pair in pairs}

    @property
    def nbytes(self) -> int:
        files = (path for path in self._folder.rglob("*") if not path.is_symlink())
        return sum(path.stat().st_size for path in files if path.is_file())

    def python(self, code: str, status: int = 0, **environment: str) -> str:
        return ran(self._folder / "bin" / "python", "-c", code, status=status, **environment)

    def zexport(
        self, *words: object, status: int = 0, cache: Path | None = None, **environment: str
    ) -> str:
        cache = cache or self._folder / "cache"
        command = self._folder / "bin" / "zexport"
        return ran(command, *words, status=status, XDG_CACHE_HOME=str(cache), **environment)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the sdist and the wheel."""
    source, dist = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(REPOSITORY / "zexport", source / "zexport", ignore=ignored)
    ran(sys.executable, "-m", "build", "--no-isolation", "--outdir", dist, source)
    return dist


@pytest.fixture(scope="module")
def bare(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Return an environment with only the wheel and its dependencies."""
    environment = Environment(tmp_path_factory.mktemp("bare"))
    before = environment.nbytes
    environment.install(*built.glob("*.whl"))
    assert environment.nbytes - before < NBYTES_MAX
    return environment


@pytest.fixture
def unnamed(tmp_path: Path) -> Path:
    """Return a checkpoint whose Hub names only transformers knows."""
    root = tmp_path / "run"
    shutil.copytree(TRAINED, root)
    (root / "zexport_source.json").unlink()
    return root


def test_wheel_installs_no_framework(bare: Environment) -> None:
    assert not bare.packages.keys() & {"torch", "transformers", "huggingface_hub", "deepspeed"}


def test_sdist_installs_the_same_files_as_the_wheel(
    built: Path, bare: Environment, tmp_path: Path
) -> None:
    bare.install("--no-deps", "--target", tmp_path, *built.glob("*.tar.gz"))
    code = (
        "import zexport; from importlib.metadata import version; from pathlib import Path\n"
        "here = Path(zexport.__file__).parent; print(here, version('zexport'))\n"
        "print(*sorted(path.name for path in here.rglob('*')))"
    )
    place, other = bare.python(code, PYTHONPATH=str(tmp_path)), bare.python(code)
    assert place.startswith(str(tmp_path))
    assert place.split()[1:] == other.split()[1:]


def test_inspect_consolidate_verify_and_diff_need_no_extras(
    bare: Environment, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    assert "exportable" in bare.zexport("inspect", TRAINED, "--stats")
    assert "reread" in bare.zexport("consolidate", TRAINED, model, "--dtype", "bf16")
    assert "intact" in bare.zexport("verify", model)
    assert "recomputed" in bare.zexport("verify", model, "--against", TRAINED)
    assert "No difference" in bare.zexport("diff", model, model)


def test_oldest_allowed_dependencies_work(bare: Environment, tmp_path: Path) -> None:
    """The lower bounds shadow the newest releases of the bare environment."""
    code = "from importlib.metadata import requires; print(*requires('zexport'), sep='\\n')"
    needed = [line for line in bare.python(code).splitlines() if "extra ==" not in line]
    oldest = [line.replace(">=", "==") for line in needed]
    assert all("==" in line for line in oldest)
    bare.install("--target", tmp_path / "oldest", *oldest)
    model = tmp_path / "model"
    for words in (
        ["--help"],
        ["inspect", TRAINED],
        ["consolidate", TRAINED, model, "--layout", "memory"],
        ["verify", model, "--against", TRAINED],
        ["diff", model, model],
    ):
        bare.zexport(*words, PYTHONPATH=str(tmp_path / "oldest"))


def test_unknown_hub_names_are_refused_with_the_pip_command(
    bare: Environment, unnamed: Path, tmp_path: Path
) -> None:
    said = bare.zexport("consolidate", unnamed, tmp_path / "model", status=2)
    assert said.startswith("Error: the Hub names of the model's weights are not known")
    assert "pip install '.[hub]'" in said
    assert not (tmp_path / "model").exists()
    kept = bare.zexport("consolidate", unnamed, tmp_path / "kept", "--layout", "memory")
    assert "config.json was not compared with the weights: no transformers" in kept


def test_cached_hub_names_need_no_transformers(
    bare: Environment, unnamed: Path, tmp_path: Path
) -> None:
    cache, here = tmp_path / "cache", [sys.executable, "-P", "-m", "zexport"]
    environment = {"XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(REPOSITORY)}
    ran(*here, "consolidate", unnamed, tmp_path / "a", **environment)
    bare.zexport("consolidate", unnamed, tmp_path / "b", cache=cache)
    a, b = ({p.name: p.read_bytes() for p in (tmp_path / n).iterdir()} for n in "ab")
    assert a == b


def test_compat_and_train_name_the_missing_extra(bare: Environment, tmp_path: Path) -> None:
    assert "ImportError: zexport.compat needs torch. Run pip install '.[hub]'" in bare.python(
        "from zexport.compat import convert_zero_checkpoint_to_fp32_state_dict", status=1
    )
    assert "pip install '.[deepspeed]'" in bare.zexport("train", tmp_path / "run", status=2)
    words = ("consolidate", TRAINED, tmp_path / "model", "--engine", "deepspeed")
    assert "pip install '.[deepspeed]'" in bare.zexport(*words, status=2)


def test_installing_changes_no_package_of_a_training_environment(
    built: Path, unnamed: Path, tmp_path: Path
) -> None:
    environment = Environment(tmp_path / "training")
    environment.install("transformers==4.57.6")
    before = environment.packages
    environment.install(*built.glob("*.whl"))
    assert before.items() <= environment.packages.items()
    assert "exportable" in environment.zexport("inspect", unnamed)
    said = environment.zexport("consolidate", unnamed, tmp_path / "model", status=2)
    assert "found: transformers 4.57.6\n  expected: transformers 5 or later" in said
    assert not (tmp_path / "model").exists()
