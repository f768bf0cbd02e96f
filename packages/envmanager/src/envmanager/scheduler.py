"""Runs trajectories for whoever owns the groups: takes tickets, plays them, scores them, hands them back.

Invariants:
- a ticket taken is ended exactly once, by finish, fail or cancel, or by its owner; a failure is never a
  reward (test_envmanager_scheduler.py::test_every_ticket_ends_once);
- `concurrency` episodes run at most, and scoring holds none of those slots
  (test_envmanager_scheduler.py::test_scoring_frees_the_slot);
- when `run` returns, no task and no environment is alive
  (test_envmanager_scheduler.py::test_nothing_is_alive_after_any_interleaving).
"""

import asyncio
import contextlib
import copy
import inspect
import itertools
import logging
import random
import zlib
from collections.abc import Callable
from functools import partial

import msgspec

from envmanager.backoff import backoff
from envmanager.barrier import Barrier
from envmanager.checks import check_callable, check_count, check_seconds
from envmanager.circuit import Circuit
from envmanager.contract import check_score, shown
from envmanager.deadline import within
from envmanager.errors import BackendDown, Closed, InfrastructureError, RewardError, RolloutError
from envmanager.faults import foreign, told
from envmanager.manager import EnvManager
from envmanager.protocols import Groups, MakeEnv, Observer, Policy, RewardClient, Ticket
from envmanager.stats import Stats
from envmanager.threads import Threads
from envmanager.values import Limits, Trajectory
from envmanager.watchdog import Stuck, Watchdog

log = logging.getLogger(__name__)


def seed_of(ticket: Ticket) -> int:
    """The same seed for all members of a group: they play one task instance."""
    return zlib.crc32(str(ticket.key).encode(errors="replace"))  # a key that is no text fails in its own episode


class _Run:
    """One ticket's way through the scheduler: `slot` until its episode is over, `ended` once its ticket was
    told so.
    """

    __slots__ = (
        "admitted",
        "circuit",
        "ended",
        "joined",
        "limits",
        "manager",
        "parked",
        "reason",
        "slot",
        "task",
        "ticket",
        "trajectory",
    )

    def __init__(self, ticket: Ticket, manager: EnvManager, limits: Limits, circuit: Circuit) -> None:
        self.ticket = ticket
        self.manager = manager
        self.circuit = circuit
        self.admitted = True
        self.parked = False
        self.limits = manager.limits = limits
        self.reason = ""
        self.slot = True
        self.joined = False
        self.ended = False
        self.trajectory: Trajectory | None = None
        self.task: asyncio.Task[None]

    def cancel(self, reason: str) -> None:
        """The owner's wish; reaches the policy and the environment as a cancellation."""
        self.reason = self.reason or reason
        self.task.cancel()

    @property
    def length(self) -> tuple[int, int]:
        """Turns and tokens so far."""
        if self.trajectory is not None:
            return len(self.trajectory.turns), self.trajectory.tokens
        episode = self.manager.episode
        if episode is None or episode.ticket is not self.ticket:  # cancelled before its first step
            return 0, 0
        return len(episode.turns), episode.tokens


class RolloutScheduler:
    """`run()` returns when the groups are closed, and raises what else they raise; cancel it to end all at
    once. `limits` may be a function of the key, where tasks are mixed.

    `reward(trajectory)` scores each finished trajectory (None: the sum of the environment's rewards), at most
    `scoring` at a time; when that is full, slots wait. `closed` are further exceptions of `next_ticket` that mean
    the ordinary end, such as the groups' own Closed. When episodes only fail, the `circuit` pauses and probes, and so
    does a copy of it when scoring only fails. With `Routed` backends each has a copy too, and the tickets of one that
    is down wait beside the slots, as many as the groups have room for. `stall_after` seconds in a phase are reported.
    """

    def __init__(
        self,
        make_env: MakeEnv,
        policy: Policy,
        groups: Groups,
        *,
        concurrency: int = 256,
        reward: RewardClient | None = None,
        limits: Limits | Callable[[str], Limits] | None = None,
        observer: Observer | None = None,
        scoring: int = 1024,
        seed: Callable[[Ticket], int] = seed_of,
        closed: tuple[type[Exception], ...] = (),
        circuit: Circuit | None = None,
        stall_after: float = 900.0,
        barrier: Barrier | None = None,
    ) -> None:
        check_count("concurrency", concurrency, 1)
        check_count("scoring", scoring, 1)
        check_seconds("stall_after", stall_after)
        check_callable("make_env", make_env, "a function of a key that makes its environment (see naming.named)")
        check_callable("policy.act", getattr(policy, "act", None), "a policy with `async act(episode)`")
        if reward is not None:
            check_callable("reward", reward, "an async function of a trajectory")
        if observer is not None:
            check_callable("observer", observer, "a function of kind, id, start and end")
        every = Limits() if limits is None else limits
        self._limits = every if callable(every) else lambda key: every
        self._groups = groups
        self._barrier = barrier
        self._reward = reward
        self._observer = observer
        self._seed = seed
        self._closed: tuple[type[Exception], ...] = (Closed, *closed)
        self._threads = Threads()
        self._slots = asyncio.Semaphore(concurrency)
        self._scoring = asyncio.Semaphore(scoring)
        self._new_manager = partial(
            EnvManager,
            make_env,
            policy,
            observer=observer,
            threads=self._threads,
            barrier=barrier,
        )
        self._idle: list[EnvManager] = []
        self._runs: set[_Run] = set()
        self._circuit = circuit or Circuit()
        self._scores = copy.deepcopy(self._circuit)
        self._circuits: dict[str, Circuit] = {}
        self._backend_of: Callable[[str], str] | None = getattr(make_env, "backend_of", None)
        self._something_ended = asyncio.Event()
        self._last_error = ""
        self._watchdog = Watchdog(stall_after, lambda: [run.manager for run in self._runs if run.slot])
        self._stats = Stats()
        self._jitter = random.Random(0)

    async def run(self) -> None:
        """Rolls out until the groups are closed, then waits for what still runs; cancelled, it cancels that too."""
        self._watchdog.start()
        try:
            async with asyncio.TaskGroup() as tasks:
                with contextlib.suppress(*self._closed):
                    await self._issue(tasks)
        except BaseExceptionGroup as errors:
            if len(errors.exceptions) == 1:
                raise errors.exceptions[0] from None
            raise
        finally:
            self._watchdog.stop()

    def stats(self) -> Stats:
        """Counts so far; a copy."""
        return copy.deepcopy(self._stats)

    def stuck(self) -> list[Stuck]:
        """Episodes that have been in one phase for `stall_after` seconds, the longest first."""
        return self._watchdog.stuck(asyncio.get_running_loop().time())

    async def _issue(self, tasks: asyncio.TaskGroup) -> None:
        """Consumes tickets, until the groups raise. Waits for a free slot, for the circuit, then for the groups'
        next ticket. Unblocked by an episode's end (frees its slot, may close the circuit), by time, and by the
        groups (they have room, or raise).
        """
        while True:
            await self._slots.acquire()
            try:
                await self._admitted(self._scores)
                if self._backend_of is None:
                    await self._admitted(self._circuit)
                ticket = await self._groups.next_ticket()
            except BaseException:
                self._slots.release()
                raise
            try:
                self._start(ticket, tasks)
            except Exception:  # the caller's route: it ends the rollout, with nothing left open
                self._slots.release()
                ticket.cancel()
                raise

    async def _admitted(self, circuit: Circuit) -> None:
        """Waits while the circuit is open: for its time, or until an episode's end closes it."""
        loop = asyncio.get_running_loop()
        while (delay := circuit.admit(loop.time())) != 0.0:
            if circuit.state == "broken":
                what = "no reward comes" if circuit is self._scores else "no episode gets through"
                tries = f"{circuit.limit} pauses did not help"
                raise BackendDown(f"{what}, and {tries}; the last failure: {self._last_error}")
            self._something_ended.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    await self._something_ended.wait()

    def _circuit_of(self, key: str) -> Circuit:
        if self._backend_of is None:
            return self._circuit
        return self._circuits.setdefault(self._backend_of(key), copy.deepcopy(self._circuit))

    async def _parked(self, run: _Run) -> None:
        """Waits for the circuit of the ticket's own backend without a slot, so that others go on."""
        self._slots.release()
        run.slot, run.parked, run.admitted = False, True, False
        self._stats.running -= 1
        self._stats.parked += 1
        await self._admitted(run.circuit)
        run.admitted = True
        await self._slots.acquire()
        run.slot, run.parked = True, False
        self._stats.running += 1
        self._stats.parked -= 1

    def _start(self, ticket: Ticket, tasks: asyncio.TaskGroup) -> None:
        circuit, limits = self._circuit_of(ticket.key), self._limits(ticket.key)
        if not isinstance(limits, Limits):
            raise ValueError(f"limits of key {ticket.key!r} are {limits!r:.100}; give Limits, or a function to them")
        run = _Run(ticket, self._idle.pop() if self._idle else self._new_manager(), limits, circuit)
        self._stats.started += 1
        self._stats.running += 1
        self._runs.add(run)
        self._join(run)
        run.task = tasks.create_task(self._roll_out(run))
        run.task.add_done_callback(lambda _: self._ended(run))
        ticket.on_cancel(run.cancel)

    async def _roll_out(self, run: _Run) -> None:
        """Consumes one ticket. Waits for its policy, environment and reward, each with a deadline.
        Unblocked by those, or by the ticket's cancellation.
        """
        ticket = run.ticket
        try:
            try:
                if self._backend_of is not None and run.circuit.admit(asyncio.get_running_loop().time()) != 0.0:
                    await self._parked(run)
                trajectory = run.trajectory = await self._play(run)
            finally:
                self._leave(run)
            run.circuit.succeeded()
            self._something_ended.set()  # scoring may take long, and others may start meanwhile
            if self._reward is not None:
                trajectory = await self._score(run, trajectory, self._reward)
                self._scores.succeeded()
        except RolloutError as error:
            log.warning("trajectory %s failed (%s): %s", ticket.id, error.kind, error)
            run.ended = True
            self._stats.failed[error.kind] += 1
            if run.trajectory is None:
                self._judge(run.circuit, error)
                self._scores.untold(asyncio.get_running_loop().time())
            else:
                self._judge(self._scores, error)
            ticket.fail(error.bare())
            return
        answer = ticket.finish(trajectory, trajectory.reward)
        run.ended = True
        self._stats.finished[answer] += 1
        (self._stats.kept if answer == "accepted" else self._stats.cut).add(len(trajectory.turns), trajectory.tokens)

    async def _play(self, run: _Run) -> Trajectory:
        """Plays the ticket's episode. What failed under the environment before anything was generated is
        tried again, later.
        """
        ticket, manager = run.ticket, run.manager
        for attempt in itertools.count():
            try:
                return await manager.run(ticket.key, self._seed(ticket), ticket)
            except InfrastructureError as error:
                if error.phase != "reset" or attempt >= run.limits.reset_retries:
                    raise
                delay = backoff(attempt, self._jitter)
                log.info("resetting again in %.1f s: %s", delay, error)
            self._stats.retries += 1
            await asyncio.sleep(delay)
        raise AssertionError("itertools.count ends never")

    def _judge(self, circuit: Circuit, error: RolloutError) -> None:
        """What an episode's failure says about the machinery: only an environment that is at fault itself speaks
        for it.
        """
        self._last_error = str(error)
        if error.kind == "data":
            circuit.succeeded()
        else:
            circuit.failed(asyncio.get_running_loop().time())

    async def _score(self, run: _Run, trajectory: Trajectory, reward: RewardClient) -> Trajectory:
        """Scores in the background of the slot's next episode."""
        if self._barrier is not None:
            await self._barrier.over()
        async with self._scoring:
            self._free(run)
            started = asyncio.get_running_loop().time()
            try:
                value = await within("scoring", run.limits.reward_timeout, self._rewarded(trajectory, reward))
            except RolloutError as error:
                error.key, error.phase = trajectory.key, "reward"
                raise
        ended = asyncio.get_running_loop().time()
        if self._observer is not None:
            self._observer("reward", trajectory.id, started, ended)
        timings = msgspec.structs.replace(trajectory.timings, reward_s=ended - started)
        return msgspec.structs.replace(trajectory, reward=value, timings=timings)

    async def _rewarded(self, trajectory: Trajectory, reward: RewardClient) -> float:
        try:
            scoring = reward(trajectory)
            if not inspect.isawaitable(scoring):
                raise RewardError(f"the reward client is not async; wrap it: rewards.LocalReward({shown(reward)})")
            value = await scoring
        except RolloutError:
            raise
        except BaseException as error:
            if not foreign(error):
                raise
            raise RewardError(f"the reward raised {told(error)}") from error
        return check_score(value)

    def _join(self, run: _Run) -> None:
        """Before its task runs, so that the first of a batch waits for those that start with it."""
        if self._barrier is not None:
            self._barrier.join()
            run.joined = True

    def _leave(self, run: _Run) -> None:
        if self._barrier is not None and run.joined:
            run.joined = False
            self._barrier.leave()

    def _free(self, run: _Run) -> None:
        """Gives the slot and its manager to the next ticket."""
        run.slot = False
        self._stats.running -= 1
        self._stats.scoring += 1
        self._idle.append(run.manager)
        self._slots.release()

    def _ended(self, run: _Run) -> None:
        """The task is over, whether it ran at all or was cancelled before its first step."""
        self._runs.discard(run)
        self._leave(run)
        if not run.ended:
            now = asyncio.get_running_loop().time()
            if run.admitted and run.trajectory is None:
                run.circuit.untold(now)
            self._scores.untold(now)
            self._stats.cancelled[run.reason or "scheduler"] += 1
            self._stats.cut.add(*run.length)
            if not run.reason:
                run.ticket.cancel()
        if run.parked:
            self._stats.parked -= 1
            self._idle.append(run.manager)
        else:
            if run.slot:
                self._free(run)
            self._stats.scoring -= 1
        self._something_ended.set()
