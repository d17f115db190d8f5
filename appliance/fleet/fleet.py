"""The models of one machine: which are loaded, which wait, and who makes room for whom."""

from __future__ import annotations

import asyncio
import time
import traceback
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any

from appliance.console.report import Report
from appliance.errors import FatalError, ModelDoesNotFitError
from appliance.fleet.admit import Evict, Places, Refuse, Resident, Wait, admit
from appliance.fleet.member import Member
from appliance.fleet.use import Uses
from appliance.keep_alive import FOREVER, shown
from appliance.race import first_of

TURN_S = 20.0  # how long a loaded model goes on with new requests while another waits for its memory
ASK_AGAIN_S = 5.0  # memory that other programs hold may change at any time
REFUSALS_MAX = 3
FAILED_S = 5.0  # so long after a failed load, requests get its error without another load
TELL_EVERY_S = 5.0  # proxies and clients give up after 30 s of silence at the earliest
EVENTS_KEPT = 20
LOADS_KEPT = 100  # more are not made while one request waits
TRACEBACK_LINES = 40  # of an unforeseen error, in the log

Tell = Callable[[str], Awaitable[None]]


class FleetEndedError(Exception):
    """Raised for a request whose model is not loaded any more, since everything stops."""


class LoadWaitError(Exception):
    """A request waited too long for its model. `about_s` is when it may be there."""

    def __init__(self, words: str, about_s: float) -> None:
        super().__init__(words)
        self.about_s = about_s


class _Wish:
    """A model that is wanted and not loaded."""

    def __init__(self, now: float) -> None:
        self.arrived_at = now
        self.waiters: set[asyncio.Future[None]] = set()
        self.is_explicit = False  # a client asked for the load itself, and does not wait for it
        self.is_prepared = False
        self.waits_for: tuple[str, ...] = ()  # models that answer; once one of them is idle, it is decided anew
        self.needs_gone: frozenset[str] = frozenset()  # these, and idle ones that have to go with them
        self.reason = ""
        self.asked_at = float("-inf")
        self.refusals = 0  # loads that found less memory than the decision before them

    @property
    def is_wanted(self) -> bool:
        return self.is_explicit or bool(self.waiters)


class _State:
    """What the fleet knows of one member."""

    def __init__(self, member: Member, now: float) -> None:
        self.member = member
        self.is_loaded = False
        self.is_loading = False
        self.leases = 0  # requests that it answers
        self.idle_since = now
        self.keep_alive_s = member.keep_alive_s
        self.wish: _Wish | None = None
        self.preparing: asyncio.Task[None] | None = None  # it may outlive its wish until its cancellation has ended
        self.is_preparing_given_up = False
        self.is_unwanted = False  # a client asked to unload it
        self.failure: tuple[float, FatalError] | None = None
        self.loads = self.evictions = 0
        self.load_seconds = 0.0
        self.why = ""
        self.sent_away_for: str | None = None


class Fleet:
    """Decides which members are loaded. Made inside the running loop.

    `lock` is held from the look at free memory until a model is loaded, so that other containers on the same volume do
    not plan with the same memory.
    """

    def __init__(
        self,
        report: Report,
        *,
        lock: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
        clock: Callable[[], float] = time.monotonic,
        turn_s: float = TURN_S,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._report = report
        self._lock = lock
        self._clock = clock
        self._turn_s = turn_s
        self._on_change = on_change
        self._states: dict[str, _State] = {}
        self._uses = Uses()
        self._changed = asyncio.Event()
        self._lost_first: FatalError | None = None
        self._has_ended = False
        self._room: Places = {}  # what all models together may hold, by the last look at free memory
        self._events: deque[str] = deque(maxlen=EVENTS_KEPT)
        self._loads: deque[tuple[float, str]] = deque(maxlen=LOADS_KEPT)  # when each of the last loads ended

    def add(self, member: Member) -> None:
        """Add a member. The first one ends the fleet if its engine is given up."""
        self._states[member.name] = _State(member, self._clock())

    def is_loaded(self, name: str) -> bool:
        return name in self._states and self._states[name].is_loaded

    def was_loaded(self, name: str) -> bool:
        """True if the model was loaded at least once."""
        return name in self._states and self._states[name].loads > 0

    @property
    def _first(self) -> _State:
        return next(iter(self._states.values()))

    @property
    def loaded(self) -> tuple[str, ...]:
        return tuple(name for name, state in self._states.items() if state.is_loaded)

    @property
    def wanted(self) -> tuple[str, ...]:
        """Names of models that are waited for, or loaded now."""
        return tuple(name for name, state in self._states.items() if state.wish or state.is_loading)

    def holds(self, but: str = "") -> dict[str, Places]:
        """Return what loaded members hold, by name, without the member `but`."""
        states = tuple(self._states.items())  # other threads ask, too
        return {name: dict(state.member.holds) for name, state in states if state.is_loaded and name != but}

    @asynccontextmanager
    async def held(
        self, name: str, *, tell: Tell | None = None, keep_alive_s: float | None = None, wait_s: float = FOREVER
    ) -> AsyncIterator[str]:
        """Wait until the model is loaded, and keep it loaded while the block runs. Yields what was waited for, in
        words; empty if the model was loaded already.

        With `tell`, the wait has no limit, and `tell` gets the reason every few seconds; else LoadWaitError is raised
        after `wait_s`. Raises the FatalError of a load that failed, and FleetEndedError once `run` has ended.
        Cancelled, the wish is withdrawn.
        """
        state = self._states[name]
        self._uses.note(name, self._clock())
        waited_for = await self._enter(state, tell, wait_s)
        # Only now: an unload that came before the load sets it back.
        if keep_alive_s is not None:
            state.keep_alive_s = keep_alive_s
        try:
            yield waited_for
        finally:
            self._release(state)

    def want(self, name: str) -> None:
        """Load this model as soon as there is room; nobody waits for it."""
        state = self._states[name]
        state.is_unwanted = False
        if not state.is_loaded:
            self._wish_of(state).is_explicit = True
            self._wake()

    def unload(self, name: str) -> None:
        """Unload this model after its running answers, and forget a wish that no request waits for.

        The first model's start is not given up: requests for it do not wait before, so nobody could wish for it again.
        """
        state = self._states[name]
        starts = self._is_starting(state) and state.wish is not None
        state.is_unwanted = state.is_loaded or state.is_loading or starts
        if state.wish is not None and not starts:
            state.wish.is_explicit = False
            self._withdraw_if_unwanted(state)
        self._wake()

    def lost(self, name: str, error: FatalError) -> None:
        """Note that the engine of a loaded member was given up."""
        state = self._states[name]
        state.is_loaded = False
        state.failure = (self._clock(), error)
        if state is self._first:
            self._lost_first = error
        self._say("model_lost", f"{name} is not loaded any more: {error.message}")
        self._wake()

    async def run(self) -> None:
        """Load and unload. Never returns. Raises the FatalError of the first member."""
        try:
            while True:
                self._changed.clear()
                if self._lost_first is not None:
                    raise self._lost_first
                wait_s = await self._step()
                if wait_s > 0:
                    await first_of(self._changed.wait(), timeout_s=None if wait_s == FOREVER else wait_s)
        finally:
            self._has_ended = True
            for state in self._states.values():
                self._end_wish(state, FleetEndedError("nothing is loaded any more"))
            tasks = [state.preparing for state in self._states.values() if state.preparing]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def document(self) -> dict[str, Any]:
        """Return the fleet for clients: each model with what it holds, who waits, and what was done last."""
        now = self._clock()
        wishes = [(name, state.wish) for name, state in self._states.items() if state.wish]
        return {
            "models": [self._row(name, state, now) for name, state in self._states.items()],
            "waiting": [
                {
                    "name": name,
                    "seconds": round(now - wish.arrived_at, 1),
                    "requests": len(wish.waiters),
                    "reason": self._sentence(name, wish),
                }
                for name, wish in sorted(wishes, key=lambda each: each[1].arrived_at)
            ],
            "free_mib": {place: round(mib) for place, mib in self._left().items()},
            "events": list(self._events),
        }

    def _left(self) -> Places:
        """Return what is left of the room for models, by place; empty before the first look at free memory."""
        held = self.holds().values()
        return {place: max(0.0, mib - sum(each.get(place, 0.0) for each in held)) for place, mib in self._room.items()}

    def _row(self, name: str, state: _State, now: float) -> dict[str, Any]:
        keep_alive_s = state.keep_alive_s
        is_idle = state.is_loaded and not state.leases
        return {
            "name": name,
            "is_loaded": state.is_loaded,
            "is_loading": state.is_loading,
            "is_pinned": state.member.is_pinned,
            "answering": state.leases,
            "idle_s": round(now - state.idle_since, 1) if is_idle else None,
            "keep_alive_s": None if keep_alive_s == FOREVER else keep_alive_s,
            "holds_mib": {place: round(mib) for place, mib in state.member.holds.items()} if state.is_loaded else {},
            "reload_s": round(state.member.reload_s, 2),
            "loads": state.loads,
            "load_seconds": round(state.load_seconds, 3),
            "evictions": state.evictions,
            "why": state.why,
            "sent_away_for": state.sent_away_for,
        }

    async def _enter(self, state: _State, tell: Tell | None, wait_s: float) -> str:
        if state.is_loaded and not self._is_over(state):
            state.leases += 1
            return ""
        if self._has_ended:
            message = "nothing is loaded any more"
            raise FleetEndedError(message)
        if state.failure is not None and self._clock() - state.failure[0] < FAILED_S:
            # Each raise adds to the traceback, whose frames hold the bodies of requests.
            raise state.failure[1].with_traceback(None)
        began, loads, held_back = self._clock(), state.loads, self._held_back(state)
        wish = self._wish_of(state)
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        wish.waiters.add(waiter)
        self._wake()
        is_entered = False
        try:
            await self._until_granted(state, wish, waiter, tell, wait_s)
            is_entered = True
        finally:
            wish.waiters.discard(waiter)
            if not is_entered:
                if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                    self._release(state)
                self._withdraw_if_unwanted(state)
        others = dict.fromkeys(name for ended, name in self._loads if ended > began and name != state.member.name)
        words = (
            held_back,
            f"{', '.join(others)} was loaded" if others else "",
            f"{state.member.name} was loaded: {state.why}" if state.loads > loads else "",
        )
        return "; ".join(filter(None, words))

    async def _until_granted(
        self, state: _State, wish: _Wish, waiter: asyncio.Future[None], tell: Tell | None, wait_s: float
    ) -> None:
        name, ends = state.member.name, self._clock() + (FOREVER if tell else wait_s)
        # A loop's turn is given first: a model that is there at once needs no comment.
        await asyncio.wait((waiter,), timeout=min(0.1, max(0.0, ends - self._clock())))
        while not waiter.done():
            if (left_s := ends - self._clock()) <= 0:
                raise LoadWaitError(self._sentence(name, wish), state.member.reload_s)
            if tell is not None:
                await tell(self._sentence(name, wish))
            await asyncio.wait((waiter,), timeout=min(TELL_EVERY_S, left_s))
        waiter.result()

    def _is_over(self, state: _State) -> bool:
        """True if a loaded model takes no new requests: another waits for its memory, or it is to be unloaded."""
        return state.is_unwanted or bool(self._whose_turn(state))

    def _whose_turn(self, state: _State) -> list[str]:
        """Return the names of the models that have waited long enough for the memory of this one."""
        name, now = state.member.name, self._clock()
        return [
            other.member.name
            for other in self._states.values()
            if other.wish and name in other.wish.needs_gone and now - other.wish.arrived_at >= self._turn_s
        ]

    def _held_back(self, state: _State) -> str:
        """Return why a model that is loaded takes no new requests; empty for one that is not loaded."""
        if not state.is_loaded:
            return ""
        whose = ", ".join(self._whose_turn(state))
        return f"{state.member.name} makes room for {whose}" if whose else f"{state.member.name} is to be unloaded"

    def _wish_of(self, state: _State) -> _Wish:
        if state.wish is None:
            state.wish = _Wish(self._clock())
            self._on_change()
        return state.wish

    def _withdraw_if_unwanted(self, state: _State) -> None:
        wish = state.wish
        if wish is None or wish.is_wanted or state.is_loading:
            return
        if state.preparing is not None and not wish.is_prepared:
            state.is_preparing_given_up = True
            state.preparing.cancel()
        state.wish = None
        self._on_change()
        self._wake()

    def _release(self, state: _State) -> None:
        state.leases -= 1
        if not state.leases:
            state.idle_since = self._clock()
        self._wake()

    def _grant(self, state: _State) -> None:
        wish, state.wish = state.wish, None
        for waiter in wish.waiters if wish else ():
            if not waiter.done():
                state.leases += 1
                waiter.set_result(None)
        self._on_change()

    def _fail(self, state: _State, error: Exception) -> None:
        """Tell all who wait for the model that it cannot be loaded. An error that is no FatalError is a bug, or a file
        or process that went away at the wrong moment: no reason to end the other models."""
        if not isinstance(error, FatalError):
            words = f"{state.member.name} failed in an unforeseen way: {type(error).__name__}: {error}"
            lines = "".join(traceback.format_exception(error)).splitlines()
            self._report.error("model_bug", words, log=lines[-TRACEBACK_LINES:])
            error = FatalError(words, hint="the log has the details")
        state.failure = (self._clock(), error)
        self._say("model_not_loaded", f"{state.member.name} cannot be loaded: {error.message}")
        self._end_wish(state, error)
        self._on_change()

    @staticmethod
    def _end_wish(state: _State, error: Exception) -> None:
        wish, state.wish = state.wish, None
        for waiter in wish.waiters if wish else ():
            if not waiter.done():
                waiter.set_exception(error)

    async def _step(self) -> float:
        """Do at most one thing; returns after how many seconds to look again, 0 after something was done."""
        for state in self._states.values():
            if (why := self._why_unload(state)) is not None:
                await self._unload(state, why)
                return 0.0
        may_evict = True
        for state in self._waiting():
            wish = state.wish
            if wish is None or not self._is_prepared(state, wish):
                continue
            if state.is_loaded:
                if not self._is_over(state):
                    self._grant(state)
                    return 0.0
                continue
            if self._may_ask(wish) and await self._try(state, wish, may_evict=may_evict):
                return 0.0
            # Who came later may be loaded beside all others meanwhile, but sends nobody away.
            may_evict = False
        return self._next_s()

    def _waiting(self) -> list[_State]:
        waiting = [
            (state.wish.arrived_at, number, state) for number, state in enumerate(self._states.values()) if state.wish
        ]
        return [state for _, _, state in sorted(waiting, key=lambda each: each[:2])]

    def _is_prepared(self, state: _State, wish: _Wish) -> bool:
        """Begin to prepare the model if that was not done; True once it is done."""
        if wish.is_prepared or state.is_loaded:
            return True
        task = state.preparing
        if task is None:
            self._prepare(state)
            return False
        if not task.done():
            return False
        was_given_up, state.preparing, state.is_preparing_given_up = state.is_preparing_given_up, None, False
        error = _error_of(task)
        if error is not None and was_given_up:  # of an earlier wish
            self._prepare(state)
            return False
        if error is not None:
            if self._is_starting(state):
                raise error  # the start fails
            self._fail(state, error)
            return False
        wish.is_prepared = True
        return True

    def _prepare(self, state: _State) -> None:
        state.preparing = asyncio.create_task(state.member.prepare(), name=f"preparing {state.member.name}")
        state.preparing.add_done_callback(lambda _task: self._wake())

    def _is_starting(self, state: _State) -> bool:
        """True for the first model before its first load, whose failure ends everything."""
        return state is self._first and not state.loads

    def _why_unload(self, state: _State) -> str | None:
        if not state.is_loaded or state.leases:
            return None
        if state.is_unwanted:
            return "a client asked for it"
        idle_s = self._clock() - state.idle_since
        is_kept = state.member.is_pinned or state.wish is not None
        return None if is_kept or idle_s < state.keep_alive_s else f"no request for {shown(state.keep_alive_s)}"

    def _may_ask(self, wish: _Wish) -> bool:
        """True if something has changed since the last decision to wait."""
        freed = [name for name in wish.waits_for if not self._states[name].leases]
        return not wish.waits_for or bool(freed) or self._clock() - wish.asked_at >= ASK_AGAIN_S

    def _next_s(self) -> float:
        """Return the seconds until something is due although nothing changes."""
        now, due = self._clock(), FOREVER
        for state in self._states.values():
            if state.is_loaded and not state.leases and not state.member.is_pinned:
                due = min(due, state.idle_since + state.keep_alive_s)
            if state.wish is not None and state.wish.is_prepared:
                due = min(due, state.wish.asked_at + ASK_AGAIN_S)
                turn_ends = state.wish.arrived_at + self._turn_s
                due = min(due, turn_ends) if turn_ends > now else due
        return max(0.05, due - now)

    async def _try(self, state: _State, wish: _Wish, *, may_evict: bool) -> bool:
        """Decide, and do it. False if the model has to wait."""
        try:
            async with self._lock():
                return await self._decided(state, wish, may_evict=may_evict)
        except Exception as error:  # a bug in one model is told to its clients, and ends no other
            if self._is_starting(state):
                raise  # the start fails
            self._fail(state, error)
            return True

    async def _decided(self, state: _State, wish: _Wish, *, may_evict: bool) -> bool:
        name = state.member.name
        if state.wish is not wish:  # its clients left while another container had the lock
            return True
        if not self.loaded:
            await self._load(state, wish, "nothing else is loaded")
            return True
        returnable = {each: held for each, held in self.holds().items() if not self._states[each].member.is_pinned}
        weighed = await state.member.weigh(returnable)
        if state.wish is not wish:
            return True
        wish.asked_at = self._clock()
        residents = self._residents(name)
        held = [each.holds for each in residents]
        self._room = {place: mib + sum(each.get(place, 0.0) for each in held) for place, mib in weighed.free.items()}
        decision = admit(name, weighed.variants, residents, weighed.free)
        if isinstance(decision, Refuse):
            raise ModelDoesNotFitError(decision.reason, hint="set a smaller ctx_size for it, or unpin another model")
        if isinstance(decision, Wait):
            wish.waits_for, wish.reason = decision.names, decision.reason
            wish.needs_gone = frozenset(decision.victims)
            return False
        if isinstance(decision, Evict):
            if not may_evict:
                return False
            await self._evict(decision, name)
            if state.wish is not wish:  # its clients left while the engines of the victims were stopped
                return True
        beside = ", ".join(each for each in self.loaded if each != name)
        try:
            await self._load(state, wish, f"beside {beside}" if beside else "nothing else is loaded")
        except ModelDoesNotFitError as error:
            # Others took memory after it was looked at. Nothing was loaded, so the decision is made anew.
            wish.refusals += 1
            if wish.refusals > REFUSALS_MAX or not returnable:
                raise
            wish.reason = error.message
            return False
        return True

    async def _evict(self, decision: Evict, name: str) -> None:
        victims = [self._states[victim] for victim in decision.victims]
        for victim in victims:
            victim.is_loaded = False  # at once: a request that comes now waits
        for victim in victims:
            victim.evictions += 1
            victim.sent_away_for = name
            await self._unload(victim, f"{name} needs its memory")

    async def _load(self, state: _State, wish: _Wish, why: str) -> None:
        name, began = state.member.name, self._clock()
        state.is_loading = True
        state.is_unwanted = state.is_unwanted and self._is_starting(state)
        self._on_change()
        loading = asyncio.create_task(state.member.load(), name=f"loading {name}")
        try:
            is_given_up = await self._until_loaded(loading, state, wish)
        finally:
            state.is_loading = False
            if not loading.done():
                loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
        error = _error_of(loading)
        if loading.cancelled() and is_given_up:
            state.is_unwanted = False
            self._withdraw_if_unwanted(state)  # unless a client asked for it while its engine was stopped
            self._on_change()
            return
        if error is not None:
            raise error
        state.is_loaded, state.failure, state.sent_away_for = True, None, None
        state.loads += 1
        state.load_seconds += self._clock() - began
        self._loads.append((self._clock(), name))
        state.idle_since = self._clock()
        state.why = why
        self._say("model_loaded", f"{name} is loaded: {why}")
        self._grant(state)

    async def _until_loaded(self, loading: asyncio.Task[None], state: _State, wish: _Wish) -> bool:
        """Wait for the load. If nobody wants it any more, and others wait or a client asked to unload it, it is
        cancelled; returns True then."""
        is_given_up = False
        while not loading.done():
            await first_of(asyncio.shield(loading), self._changed.wait())
            self._changed.clear()
            others = any(other.wish is not None and other is not state for other in self._states.values())
            if not wish.is_wanted and (others or state.is_unwanted) and not loading.done():
                is_given_up = loading.cancel()
                await asyncio.wait((loading,))
        return is_given_up

    async def _unload(self, state: _State, why: str) -> None:
        name = state.member.name
        state.is_loaded = state.is_unwanted = False
        state.why = why
        self._say("model_unloaded", f"{name} is unloaded: {why}")
        self._on_change()
        state.keep_alive_s = state.member.keep_alive_s
        try:
            await state.member.unload()
        except Exception as error:  # the next look at free memory shows whether it still holds any
            self._report.error("not_stopped", f"the engine of {name} may be left: {type(error).__name__}: {error}")

    def _residents(self, wanted: str) -> list[Resident]:
        now = self._clock()
        return [
            Resident(
                name=name,
                holds=state.member.holds,
                is_pinned=state.member.is_pinned,
                is_answering=bool(state.leases),
                reload_s=state.member.reload_s,
                use_chance=self._uses.chance(name, wanted, now),
                cache_s=state.member.cache_s,
            )
            for name, state in self._states.items()
            if state.is_loaded
        ]

    def _sentence(self, name: str, wish: _Wish) -> str:
        state = self._states[name]
        if state.is_loading or (state.preparing is not None and not wish.is_prepared):
            return state.member.progress
        loading = next((each.member.name for each in self._states.values() if each.is_loading), None)
        return wish.reason or (f"{name} waits until {loading} is loaded" if loading else f"{name} waits to be loaded")

    def _say(self, event: str, words: str) -> None:
        self._events.append(words)
        self._report.info(event, words)

    def _wake(self) -> None:
        self._changed.set()


def _error_of(task: asyncio.Task[None]) -> Exception | None:
    """Return why a task that is done has failed; None if it has not. Raises KeyboardInterrupt and the like."""
    if task.cancelled():
        return FatalError("it was cancelled from within")
    error = task.exception()
    if error is not None and not isinstance(error, Exception):
        raise error
    return error
