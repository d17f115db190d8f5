"""Compares before and after an upgrade: versions, the plan, and measured speeds. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from appliance.values import dataclass

SLOWER = 0.05
# name in the output -> label of the image
LABELS = {
    "version": "org.opencontainers.image.version",
    "cell": "io.appliance.cell",
    "build": "io.appliance.build-id",
    "source": "org.opencontainers.image.revision",
    "engine": "io.appliance.engine.version",
    "engine's source": "io.appliance.engine.commit",
    "CUDA": "io.appliance.cuda.toolkit",
}


@dataclass(frozen=True, kw_only=True)
class SpeedChange:
    """Change of one figure. `tolerance` is the combined uncertainty of both figures, as a share."""

    what: str
    unit: str  # "tok/s" is better when higher, "s" when lower
    before: float
    after: float
    tolerance: float = 0.0

    @property
    def slower_by(self) -> float:
        """Slowdown as a share of the earlier figure; negative if it is faster."""
        ratio = self.after / self.before
        return 1 - ratio if self.unit == "tok/s" else ratio - 1

    @property
    def is_slower(self) -> bool:
        return self.slower_by > SLOWER + self.tolerance

    def describe(self) -> str:
        """Return the change in words, as in "decode at 2,048 tokens: 42.1 -> 38.0 tok/s, 10 % slower"."""
        share = abs(self.slower_by)
        words = f", {share:.0%} {'slower' if self.slower_by > 0 else 'faster'}" if share >= 0.005 else ""
        return f"{self.what}: {self.before:.1f} -> {self.after:.1f} {self.unit}{words}"


def labels_changed(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    both = ((name, before.get(label, "unknown"), after.get(label, "unknown")) for name, label in LABELS.items())
    return {name: (old, new) for name, old, new in both if old != new}


def plan_changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return the changed fields of the plan from two status documents."""
    names = ("chosen", "context", "mode")
    return {
        name: (str(before.get(name)), str(after.get(name))) for name in names if before.get(name) != after.get(name)
    }


def speeds_changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[SpeedChange, ...]:
    """Return the changes of measured speeds, for the depths and jobs that both status documents have. Empty if one was
    not measured."""
    old, new = ((status.get("speeds") or {}).get("measured") or {} for status in (before, after))
    at = {each["depth"]: each for each in old.get("at", ())}
    jobs = {each["workload"]: each for each in old.get("jobs", ())}
    found = [change for each in new.get("at", ()) if each["depth"] in at for change in _at(at[each["depth"]], each)]
    found += [change for each in new.get("jobs", ()) if each["workload"] in jobs for change in _of_job(jobs, each)]
    return tuple(found)


def _at(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[SpeedChange]:
    where = f"at {new['depth']:,} tokens"
    decode, prefill = "decode_tokens_per_s", "prefill_tokens_per_s"
    off = old["decode_uncertainty"] + new["decode_uncertainty"]
    yield SpeedChange(what=f"decode {where}", unit="tok/s", before=old[decode], after=new[decode], tolerance=off)
    if old[prefill] and new[prefill] and old["prefill_tokens"] == new["prefill_tokens"]:
        yield SpeedChange(what=f"prefill {where}", unit="tok/s", before=old[prefill], after=new[prefill])


def _of_job(jobs: Mapping[str, Mapping[str, Any]], new: Mapping[str, Any]) -> Iterator[SpeedChange]:
    """Yield the changes of one job, unless another context length changed the job itself."""
    old = jobs[new["workload"]]
    if (old["tokens_in"], old["tokens_out"]) != (new["tokens_in"], new["tokens_out"]):
        return
    job = f"a {new['workload']} job"
    yield SpeedChange(what=f"first token of {job}", unit="s", before=old["ttft_s"], after=new["ttft_s"])
    yield SpeedChange(what=job, unit="s", before=old["job_s"], after=new["job_s"])
