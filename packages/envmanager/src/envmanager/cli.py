"""The command `envmanager`: `check ENV`, `play ENV` and `serve-env ENV`."""

import argparse
import asyncio
import contextlib
import os
import signal
import sys

from envmanager.backends import SubprocessBackend
from envmanager.chat import ChatPolicy
from envmanager.check import check
from envmanager.checks import check_extra
from envmanager.errors import EnvManagerError
from envmanager.manager import EnvManager
from envmanager.naming import SCHEMES, named
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
    top = argparse.ArgumentParser(prog="envmanager", description="Try environments, and serve them.")
    commands = top.add_subparsers(dest="command", required=True)
    env = argparse.ArgumentParser(add_help=False)
    env.add_argument("env", help=f"{', '.join(SCHEMES)}:ID, or module:factory; options as ?name=value&...")
    episode = argparse.ArgumentParser(add_help=False)
    episode.add_argument("--key", default="0", help="the task instance (default 0)")
    episode.add_argument("--seed", type=int, default=0)
    episode.add_argument("--actions", type=lambda text: text.split(","), help="comma-separated, for random play")

    what = "Say whether an environment keeps the contract."
    commands.add_parser("check", help=what, description=what, parents=[env, episode])

    play = commands.add_parser("play", help="Play one episode.", parents=[env, episode])
    play.add_argument("--policy", default="random", help="random, human, or an OpenAI-compatible URL")
    play.add_argument("--model", default="", help="the model at that URL; its key is in OPENAI_API_KEY")
    play.add_argument("--max-turns", type=int, default=100)

    serve = commands.add_parser("serve-env", help="Serve environments over HTTP.", parents=[env])
    serve.add_argument("--host", default="127.0.0.1")
    serve.add_argument("--port", type=int, default=8800, help="0 for any that is free")
    serve.add_argument("--capacity", type=int, default=256, help="environments at a time")
    serve.add_argument("--idle", type=float, default=3600.0, help="seconds until an abandoned one is closed")
    serve.add_argument("--isolate", action="store_true", help="each environment in a process of its own")
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


async def _serve(args: argparse.Namespace) -> int:
    check_extra("aiohttp", "http", "serve-env")
    from aiohttp import web

    from envmanager.backends.server import EnvServer

    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    token = os.environ.get("ENVMANAGER_TOKEN", "")
    async with contextlib.AsyncExitStack() as stack:
        make_env = named(args.env)
        if args.isolate:
            make_env = await stack.enter_async_context(SubprocessBackend(args.env))
        server = EnvServer(make_env, capacity=args.capacity, idle_s=args.idle, token=token)
        runner = web.AppRunner(server.app())
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        try:
            await web.TCPSite(runner, args.host, args.port).start()
        except (OSError, OverflowError) as error:
            raise ValueError(f"--host {args.host} --port {args.port} cannot be listened on: {error}") from error
        print(f"serving {args.env} on http://{args.host}:{runner.addresses[0][1]}", flush=True)
        await ended.wait()
    return 0


def _report(trajectory: Trajectory) -> None:
    print(f"[reward {trajectory.turns[-1].reward:g}]" if trajectory.turns else "")
    print(f"\n{trajectory.outcome.kind} after {len(trajectory.turns)} turns, reward {trajectory.reward:g}")


COMMANDS = {"check": _check, "play": _play, "serve-env": _serve}


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        return asyncio.run(COMMANDS[args.command](args))
    except (EnvManagerError, ValueError, BrokenPipeError) as error:
        if isinstance(error.__cause__ or error, BrokenPipeError):
            # Whoever read the output has seen enough; the interpreter's own flush is not to fail, too.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        print(f"envmanager: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        sys.stdout.flush()
        os._exit(130)  # a thread may be reading the keyboard still: Python cannot end in order beside it


if __name__ == "__main__":
    sys.exit(main())
