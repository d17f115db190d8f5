"""Check of the engine's CPU kernels before they serve on this machine, unless the record already has the result."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from appliance.console.report import Report
from appliance.engines.engine import Inputs, Install
from appliance.engines.llama.kernels.kernel_record import Checked, KernelStore
from appliance.engines.llama.kernels.kernels import CPU_PROGRAM, Asked, KernelReport, asked_of, is_there, query_kernels
from appliance.engines.llama.planning.memory.kv_types import kv_candidates
from appliance.plan import KvCheck, RuledOut, k_and_v
from appliance.system.detached import begin


@dataclass(frozen=True, kw_only=True)
class _Check:
    variant: str
    asked: Asked
    found: asyncio.Future[Sequence[KernelReport]]
    unwanted: threading.Event  # set to end it


class KernelGuard:
    """Runs the checks of one model in a thread, one at a time. Created inside the running event loop."""

    def __init__(self, store: KernelStore, report: Report, install: Install, *, threads: int) -> None:
        self._store = store
        self._record = store.load()
        self._report = report
        self._install = install
        self._threads = threads
        self._check: _Check | None = None
        self._warned: set[str] = set()

    @property
    def is_checking(self) -> bool:
        return self._check is not None

    def begin(self, inputs: Inputs, kv_checks: Sequence[KvCheck] = ()) -> None:
        """Start the check, unless this start or an earlier one on this volume has done it."""
        kernels = inputs.kernels
        if self._check is not None or kernels.variant is None:
            return
        asked = asked_for(inputs, kv_checks)
        known = self._record.check_of(kernels.variant, asked)
        if known is None and not is_there(self._install.engine_dir):
            known = Checked(asked=asked, problem=f"this image has no {CPU_PROGRAM}")
        if known is not None:
            if known.problem:
                self._warn(kernels.variant, known.problem)
            return
        # In a thread that starts now, because the loop may be busy with imports for half a second.
        unwanted = threading.Event()
        found = asyncio.wrap_future(begin(partial(self._ask, kernels.variant, asked, unwanted)))
        self._check = _Check(variant=kernels.variant, asked=asked, found=found, unwanted=unwanted)

    async def finish(self) -> tuple[str, str] | None:
        """Wait for the check; return the variant that failed and how, or None. Other results are kept on the volume."""
        check = self._check
        if check is None:
            return None
        (report,) = await asyncio.shield(check.found)
        self._check = None
        if report.why_not:
            return report.variant, report.why_not
        if report.problem:
            self._warn(check.variant, report.problem)
        else:
            words = f"kernels of {check.variant} checked in {report.seconds:.1f} s: {report.describe()}"
            self._report.info("kernels_checked", words, variant=check.variant, cases=report.cases)
        self._record = self._store.note(check.variant, Checked(asked=check.asked, problem=report.problem))
        return None

    @property
    def known(self) -> RuledOut:
        """Variants that are ruled out or checked so far."""
        return self._store.ruled_out(self._record)

    def rule_out(self, variant: str, seen: str) -> RuledOut:
        """Rule a variant out for this start and later ones on this CPU and build; return all that are ruled out."""
        if variant not in self._record.ruled_out:
            words = f"the engine's CPU variant {variant} is ruled out on this CPU: {seen}"
            self._report.warning("cpu_variant_ruled_out", words, variant=variant, kept=str(self._store.path))
            self._record = self._store.rule_out(variant, seen)
        return self._store.ruled_out(self._record)

    def give_up(self) -> None:
        """Stop the check and drop its result, which says nothing of the kernels. `begin` may start another."""
        if self._check is not None:
            self._check.unwanted.set()
            self._check = None

    def _ask(self, variant: str, asked: Asked, unwanted: threading.Event) -> Sequence[KernelReport]:
        return query_kernels(
            self._install.engine_dir,
            (variant,),
            asked,
            cache_dir=self._install.cache_dir,
            threads=self._threads,
            is_wanted=lambda: not unwanted.is_set(),
        )

    def _warn(self, variant: str, problem: str) -> None:
        if variant not in self._warned:
            self._warned.add(variant)
            words = f"the kernels of {variant} are not checked: {problem}"
            self._report.warning("kernels_not_checked", words, variant=variant)


def asked_for(inputs: Inputs, kv_checks: Sequence[KvCheck] = ()) -> Asked:
    """Return the weight and KV cache types that kernels of plans for these models have to compute with."""
    models = (inputs.model, *((inputs.draft,) if inputs.draft else ()))
    types = {matrices.type_name for each in models for matrices in each.matrices}
    kinds = kv_candidates(inputs.settings, inputs.facts, inputs.model, kv_checks, on_gpu=False)
    return asked_of(types, {each for kind in kinds for each in k_and_v(kind)})
