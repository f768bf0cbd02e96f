"""The control plane of a run: proxy, buffer, scheduler, evaluator and controller, made and wired in one place."""

from __future__ import annotations

from contextlib import AsyncExitStack

import msgspec

from envmanager import Barrier, RolloutScheduler, Trajectory
from llmproxy import AffinityRouter, LLMProxy, ProxyConfig
from rollart.config import Config
from rollart.observe.trace import Trace
from rollart.pipeline.controller import Controller
from rollart.pipeline.evaluator import Evaluator
from rollart.pipeline.modes import MODES
from rollart.pipeline.probe import ParityProbe
from rollart.pipeline.proxies import Proxies
from rollart.pipeline.varied import Varied
from rollart.pipeline.weights import WeightPath
from rollart.policy import TokenPolicy
from rollart.runtime.checkpoint import PAYLOADS
from rollart.runtime.meter import Meter
from rollart.runtime.parts import Parts
from rollart.runtime.setting import Setting
from samplebuffer import Closed, SampleBuffer

# One prompt would prove little, many would cost rollout time after every update.
_PROBE_PROMPTS = 4
# How much later than they should things may be noticed.
_SLACK_S = 60.0


class Control:
    """The objects of the driver. `close` ends what they run; the parts stay."""

    def __init__(
        self, config: Config, setting: Setting, parts: Parts, trace: Trace, buffer: bytes | None, served: int
    ) -> None:
        """`buffer` is the encoded state of the sample buffer to go on from; `served` the version it starts at."""
        self._config = config
        self._setting = setting
        mode = MODES[config.run.mode]
        self.meter = Meter(trace)
        bounds = _bounds(config.generation.start_timeout_s)
        proxies = [_proxy(config, parts, bounds) for _ in range(config.generation.proxies)]
        self.proxy = Proxies(proxies, patience_s=2 * bounds.update)
        self.buffer = _buffer(config, setting, buffer)
        self.weights = WeightPath(parts.trainer, parts.workers, trace, patience_s=config.generation.start_timeout_s)
        self.scheduler = RolloutScheduler(
            setting.make_env,
            self._policy("train-"),
            self.buffer,
            concurrency=config.rollout.concurrency,
            reward=setting.tasks.reward,
            limits=setting.limits,
            observer=self.meter.environment,
            closed=(Closed,),
            barrier=Barrier() if mode.lockstep else None,
        )
        self.evaluator = Evaluator(
            setting.make_env,
            self._policy,
            setting.eval_keys,
            concurrency=config.rollout.concurrency,
            limits=setting.limits,
        )
        probe = setting.probe(_PROBE_PROMPTS)
        self.controller = Controller(
            mode=mode,
            buffer=self.buffer,
            gateway=self.proxy,
            trainer=parts.trainer,
            weights=self.weights,
            probe=ParityProbe(
                parts.workers,
                parts.trainer,
                probe.prompts,
                max_tokens=probe.max_tokens,
                sampling=probe.sampling,
            ),
            evaluate=self.evaluator.success,
            trace=trace,
            served=served,
            parity_limit=config.weights.parity_limit,
        )

    def saved_buffer(self) -> bytes:
        """The sample buffer's state, consistent at any moment."""
        return msgspec.msgpack.encode(self.buffer.state_dict(PAYLOADS))

    async def close(self) -> None:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self.proxy.close)
            stack.callback(self.buffer.close)
            stack.push_async_callback(self.weights.close)

    def _policy(self, prefix: str) -> TokenPolicy:
        return TokenPolicy(self.proxy, self._setting.settings, prefix=prefix, observe=self.meter.generated)


def _bounds(start_timeout_s: float) -> ProxyConfig:
    """An engine that is silent for as long as a start may take is ended and started anew: an update waits for that,
    and `Proxies` for the update, so that the engine is the one who is told of.
    """
    return ProxyConfig(patience=start_timeout_s, update=start_timeout_s + _SLACK_S)


def _proxy(config: Config, parts: Parts, bounds: ProxyConfig) -> LLMProxy:
    return LLMProxy(
        parts.workers,
        router=parts.router or AffinityRouter(config.generation.affinity),
        prefill_router=parts.prefill_router,
        config=bounds,
        version=0,
    )


def _buffer(config: Config, setting: Setting, saved: bytes | None) -> SampleBuffer:
    settings, mode = config.buffer, MODES[config.run.mode]
    keep = Varied(4 * settings.batch_groups) if settings.drop_uniform else None
    patience = settings.patience if mode.evict and not mode.hold else 0.0
    if saved is not None:
        state = msgspec.msgpack.decode(saved)
        return SampleBuffer.restore(
            state, setting.train_keys(), codec=PAYLOADS, keep=keep, length=_turns, patience=patience
        )
    return SampleBuffer(
        setting.train_keys(),
        batch_groups=settings.batch_groups,
        group_size=settings.group_size,
        alpha=settings.alpha,
        spare_groups=settings.spare_groups,
        spare_members=settings.spare_members,
        evict=mode.evict,
        keep=keep,
        length=_turns,
        patience=patience,
    )


def _turns(trajectory: Trajectory) -> int:
    return len(trajectory.turns)
