"""GPU memory peaks of served plans: `<id>.peak` beside the profile of the same key; it may exist without a profile.

The file has one entry per configuration, because machines with equal GPUs share the key.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

from appliance.documents import Rules, load, read
from appliance.engines.gpus import device_id
from appliance.plan import CardPeak, MemoryPeak, Plan
from appliance.probe import Gpu
from appliance.profile.files import ProfileFiles, refusing
from appliance.profile.record import Key, parse_plan

KEPT_MAX = 16  # configurations, the most recently seen ones
_RULES: Rules = {
    CardPeak: lambda card: card.is_possible,
    MemoryPeak: lambda peak: (
        tuple(card.device for card in peak.cards) == tuple(share.gpu.id for share in peak.plan.placement.shares) != ()
    ),
}


class MemoryPeaks:
    """Kept peaks by profile id; the id changes with the schema. `warn` is called for entries that are unreadable or
    impossible."""

    def __init__(self, files: ProfileFiles, warn: Callable[[str], None]) -> None:
        self._files = files
        self._warn = warn

    def kept(self, key: Key, gpus: Sequence[Gpu]) -> tuple[MemoryPeak, ...]:
        """Return the kept peaks that are possible on these GPUs. Changes nothing.

        An unreadable file is reported and counts as empty; the next `keep` replaces it.
        """
        path = self._files.path(key.id, ".peak")
        try:
            return self._believed(parse_peaks(self._files.read(path)), gpus)
        except FileNotFoundError:
            return ()
        except OSError as error:
            self._warn(f"memory peak of an earlier start cannot be read, not used: {path}: {error.strerror}")
        except ValueError as error:
            self._warn(f"memory peak of an earlier start cannot be read, not used: {path}: {error}")
        return ()

    def keep(self, key: Key, peak: MemoryPeak, gpus: Sequence[Gpu]) -> bool:
        """Add a peak, merged with those that this or another container kept. An unreadable file is set aside.

        Returns False, without waiting, if another process holds the lock. Raises VolumeError.
        """

        def merged(before: tuple[MemoryPeak, ...]) -> tuple[MemoryPeak, ...]:
            found = self._believed(before, gpus)
            same = [each for each in found if each.is_of(peak.plan)]
            others = [each for each in found if not each.is_of(peak.plan)]
            return (peak.merged_with(same[0]) if same else peak, *others)[:KEPT_MAX]

        return self._change(key, merged)

    def doubt(self, key: Key, plan: Plan) -> bool:
        """Mark this configuration's peak as incomplete: the engine needed more memory than was seen.

        Returns False if another process holds the lock. Raises VolumeError.
        """

        def doubted(before: tuple[MemoryPeak, ...]) -> tuple[MemoryPeak, ...]:
            return tuple(replace(each, is_whole=each.is_whole and not each.is_of(plan)) for each in before)

        return self._change(key, doubted)

    def forget(self, id_: str) -> None:
        """Remove the file. Call it under the profile's lock. Raises OSError."""
        self._files.remove(self._files.path(id_, ".peak"))

    def _change(self, key: Key, change: Callable[[tuple[MemoryPeak, ...]], tuple[MemoryPeak, ...]]) -> bool:
        path = self._files.path(key.id, ".peak")
        with self._files.locked_at_once(key.id) as is_ours, refusing(f"memory peak cannot be kept: {path}"):
            if not is_ours:
                return False
            self._files.drop_leftovers(key.id)
            before: tuple[MemoryPeak, ...] = ()
            try:
                before = parse_peaks(self._files.read(path))
            except FileNotFoundError:
                pass
            except ValueError as error:
                aside = path.with_suffix(".peak-corrupt")
                self._files.rename(path, aside)
                self._warn(f"memory peak of an earlier start set aside as {aside.name}: {error}")
            after = change(before)
            if after != before:
                self._files.put(path, json.dumps({"peaks": [asdict(each) for each in after]}, sort_keys=True).encode())
        return True

    def _believed(self, peaks: Sequence[MemoryPeak], gpus: Sequence[Gpu]) -> tuple[MemoryPeak, ...]:
        """Return the peaks that fit into these GPUs' memory. A peak of an absent GPU is kept: no plan uses it."""
        total_mib = {device_id(gpu): gpu.vram_total_mib for gpu in gpus if gpu.vram_total_mib is not None}
        found = []
        for peak in peaks:
            beyond = [card for card in peak.cards if card.peak_mib > total_mib.get(card.device, card.peak_mib)]
            for card in beyond:
                words = f"{card.peak_mib:,} MiB of {card.device}, which has {total_mib[card.device]:,}"
                self._warn(f"memory peak of an earlier start is not believed, not used: {words}")
            found += [] if beyond else [peak]
        return tuple(found)


def parse_peaks(data: bytes) -> tuple[MemoryPeak, ...]:
    """Parse the file's content. Raises ValueError if `keep` did not write it."""
    document = load(data.decode())
    if document.keys() != {"peaks"} or not isinstance(document["peaks"], list):
        message = f"it has no list of peaks: {', '.join(document)}"
        raise ValueError(message)
    return tuple(read(MemoryPeak, each, rules=_RULES, plan=parse_plan) for each in document["peaks"])
