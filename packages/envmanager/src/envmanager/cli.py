"""The command `envmanager`: `check ENV` and `play ENV`."""

import argparse
import asyncio
import os
import sys

from envmanager.chat import ChatPolicy
from envmanager.check import check
from envmanager.errors import EnvManagerError
from envmanager.manager import EnvManager
from envmanager.naming import named
from envmanager.policies import HumanPolicy, RandomPolicy
from envmanager.protocols import Policy
from envmanager.values import Action, Episode, Limits, Trajectory


class Shown:
    """A policy whose episode is printed as it goes."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    async def act(self, episode: Episode) -> Action | None:
        if episode.turns:
            print(f"[reward {episode.turns[-1].reward:g}]")
        print(f"\n{episode.observation}")
        action = await self._policy.act(episode)
        if action is not None:
            print(f"> {action.text}")
        return action


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="envmanager", description="Try environments as the rollout sees them.")
    commands = top.add_subparsers(dest="command", required=True)
    for name, what in [("check", "Say whether an environment keeps the contract."), ("play", "Play one episode.")]:
        command = commands.add_parser(name, help=what, description=what)
        command.add_argument("env", help="gymnasium:ID, or module:factory; options as ?name=value&...")
        command.add_argument("--key", default="0", help="the task instance (default 0)")
        command.add_argument("--seed", type=int, default=0)
        command.add_argument("--actions", type=lambda text: text.split(","), help="comma-separated, for random play")
        if name == "play":
            command.add_argument("--policy", default="random", help="random, human, or an OpenAI-compatible URL")
            command.add_argument("--model", default="", help="the model at that URL; its key is in OPENAI_API_KEY")
            command.add_argument("--max-turns", type=int, default=100)
    return top


async def _check(args: argparse.Namespace) -> int:
    findings = await check(named(args.env), key=args.key, seed=args.seed, actions=args.actions)
    for finding in findings:
        print(f"{'ok  ' if finding.holds else 'FAIL'} {finding.rule}: {finding.detail}")
    return 0 if all(finding.holds for finding in findings) else 1


async def _play(args: argparse.Namespace) -> int:
    limits = Limits(max_turns=args.max_turns)
    make_env = named(args.env)
    if args.policy.startswith(("http://", "https://")):
        async with ChatPolicy(args.policy, args.model, api_key=os.environ.get("OPENAI_API_KEY", "")) as chat:
            _report(await EnvManager(make_env, Shown(chat), limits=limits).run(args.key, args.seed))
        return 0
    if args.policy not in ("random", "human"):
        raise ValueError(f"--policy is {args.policy!r}; use random, human, or a URL")
    policy: Policy = RandomPolicy(args.seed, args.actions) if args.policy == "random" else HumanPolicy()
    _report(await EnvManager(make_env, Shown(policy), limits=limits).run(args.key, args.seed))
    return 0


def _report(trajectory: Trajectory) -> None:
    print(f"[reward {trajectory.turns[-1].reward:g}]" if trajectory.turns else "")
    print(f"\n{trajectory.outcome.kind} after {len(trajectory.turns)} turns, reward {trajectory.reward:g}")


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        return asyncio.run(_check(args) if args.command == "check" else _play(args))
    except (EnvManagerError, ValueError) as error:
        print(f"envmanager: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
