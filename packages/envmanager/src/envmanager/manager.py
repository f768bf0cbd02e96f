"""One environment's controller: reset, then act and step in turn, on its own timeline.

Invariants:
- one episode at a time; each is a new incarnation with a new environment, so nothing late reaches the next
  (test_envmanager_host.py::test_late_step_lands_nowhere);
- an episode ends in a trajectory, a RolloutError, or its cancellation, and its environment is closed first
  (test_envmanager_manager.py::test_every_failure_is_typed_and_says_where);
- the ticket is stamped once, with the version of the first generated token, before any step
  (test_envmanager_manager.py::test_stamped_once_with_the_first_version).
"""

import asyncio
import logging
import uuid
from typing import Any

from envmanager.barrier import Barrier
from envmanager.contract import encodable, plain, shown
from envmanager.deadline import within
from envmanager.errors import Busy, DataError, PolicyError, RolloutError
from envmanager.faults import foreign, told
from envmanager.host import EnvHost
from envmanager.protocols import MakeEnv, Observer, Policy, Ticket
from envmanager.threads import Threads
from envmanager.values import Action, Episode, Limits, Outcome, Timings, Trajectory, Turn

log = logging.getLogger(__name__)


class EnvManager:
    """Runs episodes one after another. `phase` and `since` say what it is doing now, `episode` with which
    one (or did last).
    """

    __slots__ = (
        "_barrier",
        "_make_env",
        "_observer",
        "_policy",
        "_stamped",
        "_threads",
        "episode",
        "incarnation",
        "limits",
        "phase",
        "since",
    )

    def __init__(
        self,
        make_env: MakeEnv,
        policy: Policy,
        *,
        limits: Limits | None = None,
        observer: Observer | None = None,
        threads: Threads | None = None,
        barrier: Barrier | None = None,
    ) -> None:
        self._make_env = make_env
        self._policy = policy
        self._observer = observer
        self._threads = threads or Threads()
        self._barrier = barrier
        self.limits = limits or Limits()
        self._stamped = False
        self.incarnation = 0
        self.episode: Episode | None = None
        self.phase = "idle"
        self.since = 0.0

    async def run(self, key: str, seed: int, ticket: Ticket | None = None) -> Trajectory:
        """One episode, from making its environment to closing it."""
        if self.phase != "idle":
            running = self.episode.key if self.episode is not None else ""
            raise Busy(f"this EnvManager is running {running!r}; use one for each episode at a time")
        self.incarnation += 1
        self._stamped = False
        name = str(ticket.id) if ticket is not None else f"{key}-{uuid.uuid4().hex[:12]}"
        episode = self.episode = Episode(id=name, key=key, seed=seed, ticket=ticket, turns=[])
        host = EnvHost(self._make_env, key, self._threads)
        self._enter("reset")
        try:
            return await within("episode", self.limits.episode_timeout, self._play(episode, host))
        except BaseException as error:
            self._leave(self.phase, episode.id)  # what was cut short took its time too
            if isinstance(error, RolloutError):
                error.key, error.phase = key, self.phase
            raise
        finally:
            self._enter("close")
            try:
                await self._close(host)
            finally:
                self.phase = "idle"

    async def _play(self, episode: Episode, host: EnvHost) -> Trajectory:
        started = self.since
        observation, info = await within("reset", self.limits.reset_timeout, host.reset(episode.seed))
        reset_at = self._leave("reset", episode.id)
        episode.task, episode.observation, episode.info = host.task, observation, info
        metadata = plain(info)
        while (outcome := await within("turn", self.limits.turn_timeout, self._turn(episode, host))) is None:
            pass
        return Trajectory(
            id=episode.id,
            key=episode.key,
            seed=episode.seed,
            task=episode.task,
            turns=episode.turns,
            reward=sum(turn.reward for turn in episode.turns),
            outcome=outcome,
            timings=Timings(started=started, reset_s=reset_at - started, ended=asyncio.get_running_loop().time()),
            metadata=metadata | plain(episode.info),
        )

    async def _turn(self, episode: Episode, host: EnvHost) -> Outcome | None:
        """Act, then step. Ends the episode with an outcome, or goes on with None."""
        turns = episode.turns
        self._enter("generate")
        generate_at = self.since
        if self._barrier is not None:
            await self._barrier.arrive()
        action = await self._act(episode)
        env_at = self._leave("generate", episode.id)
        if action is None:
            return Outcome("stopped", len(turns))
        if action.spans and not self._stamped and episode.ticket is not None:
            self._stamped = True
            episode.ticket.stamp(action.spans[0].version)
        self._enter("step", env_at)
        stepped = await host.step(action.text, self.limits.step_timeout)
        observation, reward, terminated, truncated, info = stepped
        ended = self._leave("step", episode.id)
        turns.append(
            Turn(
                observation=episode.observation,
                action=action.text,
                prompt_ids=action.prompt_ids,
                token_ids=action.token_ids,
                logprobs=action.logprobs,
                spans=action.spans,
                new_segment=action.new_segment,
                reward=reward,
                generate_at=generate_at,
                generate_s=env_at - generate_at,
                env_at=env_at,
                env_s=ended - env_at,
            )
        )
        episode.observation, episode.info = observation, info
        if terminated or truncated:
            return Outcome("terminated" if terminated else "truncated", len(turns))
        return Outcome("max_turns", len(turns)) if len(turns) >= self.limits.max_turns else None

    async def _act(self, episode: Episode) -> Action | None:
        try:
            action = await self._policy.act(episode)
        except RolloutError:
            raise
        except BaseException as error:
            if not foreign(error):
                raise
            raise PolicyError(f"the policy raised {told(error)}") from error
        if action is None:
            if not episode.turns:
                raise DataError(
                    "the policy stopped before its first action; the first observation leaves no room to answer"
                )
        elif not isinstance(action, Action):
            raise PolicyError(f"the policy returned {shown(action)}; return an Action, or None to stop")
        elif not isinstance(action.text, str) or not encodable(action.text):
            raise PolicyError(f"the action's text is {shown(action.text)}; return a str without lone surrogates")
        elif len(action.logprobs) not in (0, len(action.token_ids)):
            counts = f"{len(action.token_ids)} token_ids and {len(action.logprobs)} logprobs"
            raise PolicyError(f"the action has {counts}; give one for each token, or none")
        return action

    async def _close(self, host: EnvHost) -> None:
        try:
            await within("close", self.limits.close_timeout, host.close())
        except RolloutError as error:
            log.warning("closing the environment of %r: %s", self.episode and self.episode.key, error)

    def _enter(self, phase: str, now: float | None = None) -> None:
        self.phase = phase
        self.since = asyncio.get_running_loop().time() if now is None else now

    def _leave(self, phase: Any, trajectory: str) -> float:
        """Reports the phase that ends now to the trace."""
        now = asyncio.get_running_loop().time()
        if self._observer is not None:
            self._observer(phase, trajectory, self.since, now)
        return now
