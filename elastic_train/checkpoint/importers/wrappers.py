"""Names without what wrappers added: torch.compile, DDP, FSDP1 and activation checkpointing.

Their private words mean nothing else and go wherever they are. `module` is a word that anybody may use: it
goes before a private word, and at the front where every name begins with it, as under DDP.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

PRIVATE = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
WRAPPED = "module"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrappers:
    """What is around the names of one model; `whole` is the wrapper around all of it."""

    whole: bool

    @classmethod
    def around(cls, names: Collection[str]) -> Wrappers:
        bare = [_without_private(name) for name in names]
        return cls(whole=bool(bare) and all(parts[0] == WRAPPED and len(parts) > 1 for parts in bare))

    def __call__(self, name: str) -> str:
        """The name in the model itself."""
        parts = _without_private(name)
        return ".".join(parts[1:] if self.whole and parts[0] == WRAPPED and len(parts) > 1 else parts)

    @property
    def assumed(self) -> list[str]:
        """What the names don't prove."""
        if not self.whole:
            return []
        said = (
            "every name begins with `module.`, which is taken for a wrapper such as DistributedDataParallel"
        )
        return [f"{said}; if it is a submodule's name, a specification gives it back"]

    def twice(self, names: Collection[str]) -> str | None:
        """A name that two of the given ones are, once inside of a wrapper."""
        seen: set[str] = set()
        for name in names:
            bare = self(name)
            if bare in seen or (bare.startswith(f"{WRAPPED}.") and bare.partition(".")[2] in names):
                return bare
            seen.add(bare)
        return None


def _without_private(name: str) -> list[str]:
    parts = name.split(".")
    kept = [
        part
        for part, after in zip(parts, [*parts[1:], ""], strict=True)
        if part not in PRIVATE and not (part == WRAPPED and after in PRIVATE)
    ]
    return kept or parts
