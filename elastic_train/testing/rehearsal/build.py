"""The device's library, compiled where it is first needed and kept for every process after."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import shutil
import sys
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from types import ModuleType

import torch

NAME = "elastic_train_rehearsal"
COMPILER = "c++"
SOURCES = Path(__file__).parent / "csrc"


def missing() -> str:
    """Why the library can't be compiled here; "" where it can, or is already."""
    if _library().exists():
        return ""
    absent = [program for program in (COMPILER, "ninja") if shutil.which(program) is None]
    return f"nothing to compile it with: {', '.join(absent)} is not on the path" if absent else ""


def load_library() -> ModuleType:
    """Compile it unless that was done for this torch and these sources.

    RuntimeError with the compiler's words where it is refused.
    """
    if NAME in sys.modules:
        return sys.modules[NAME]
    path = _library()
    path.parent.mkdir(parents=True, exist_ok=True)
    with (path.parent / "compiling").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one process compiles, others wait for it
        if not path.exists():
            _compile(path)
    spec = importlib.util.spec_from_file_location(NAME, path, loader=ExtensionFileLoader(NAME, str(path)))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[NAME] = module
    return module


def _library() -> Path:
    digest = hashlib.blake2b(digest_size=8)
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    kept = Path.home() / ".cache" / "elastic_train" / "rehearsal"
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return kept / f"torch-{torch.__version__}-python-{python}-{digest.hexdigest()}" / f"{NAME}.so"


def _compile(path: Path) -> None:
    from torch.utils import cpp_extension  # noqa: PLC0415 - asks for a compiler when it is imported

    # Torch's own lock, for which it would wait for ever where a compilation was killed. Ours is held.
    (path.parent / "lock").unlink(missing_ok=True)
    cpp_extension.load(
        NAME,
        [str(SOURCES / "library.cpp")],
        extra_cflags=["-O1", "-fvisibility=hidden"],
        build_directory=str(path.parent),
        is_python_module=False,
        keep_intermediates=False,
    )
