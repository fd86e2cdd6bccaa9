"""`ckpt plan`: compute what the ranks of a plan would read of a checkpoint, and the memory it takes."""

from __future__ import annotations

from collections.abc import Sequence

from elastic_train.axes import AXES, BATCH
from elastic_train.checkpoint.read_plan import read_plan, sharded
from elastic_train.cli.output import say, say_json
from elastic_train.cli.show_checkpoints import opened
from elastic_train.errors import ConfigError
from elastic_train.observe.text_columns import columns
from elastic_train.planner.plan import bytes_text


def show_read_plan(
    run: str, step: int | None, *, to: str, job: str | None, arguments: Sequence[str], as_json: bool
) -> None:
    checkpoint = opened(run, step)
    axes = _axes(to)
    if job is not None:
        from elastic_train.cli.show_plan import held_by_ranks

        ranks = held_by_ranks(job, arguments, axes)
    elif axes.keys() <= set(BATCH):
        ranks = sharded(checkpoint, axes.get("dp_shard", 1))
    else:
        raise ConfigError(
            field="--to",
            problem=f"{', '.join(sorted(axes.keys() - set(BATCH)))} cut a model in a way that its job knows.",
            remedy="Name it: --job JOB, and its options after it.",
        )
    plan = read_plan(checkpoint, ranks)
    if as_json:
        ranks = [{n: getattr(r, n) for n in r.__dataclass_fields__} for r in plan.ranks]
        say_json({"amplification": plan.amplification, "ranks": ranks})
        return
    table = [("rank", "state", "read", "ranges", "peak memory")]
    table += [
        (
            str(r.rank),
            bytes_text(r.state_bytes),
            bytes_text(r.read_bytes),
            str(r.reads),
            bytes_text(r.peak_bytes),
        )
        for r in plan.ranks
    ]
    say(columns(table))
    say(f"read amplification {plan.amplification:.3f}")


def _axes(text: str) -> dict[str, int]:
    """`pp=2,dp_shard=4` as sizes by axis."""
    axes: dict[str, int] = {}
    for part in text.split(","):
        name, _, number = part.strip().partition("=")
        if name not in AXES or not number.isdecimal() or not int(number):
            raise ConfigError(
                field="--to", problem=f"{part!r} isn't AXIS=N.", remedy=f"The axes are {', '.join(AXES)}."
            )
        axes[name] = int(number)
    return axes
