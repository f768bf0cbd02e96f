"""The circuit as a state machine, and in the scheduler."""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.envmanager.fakes import BufferClosed, FakeBuffer, FakePolicy, World, virtual

from envmanager import BackendDown, Circuit, Limits, RewardError, RolloutScheduler, Trajectory
from envmanager.backends import Routed


def test_opens_waits_probes_and_closes():
    circuit = Circuit(threshold=2)
    circuit.failed(0.0)
    assert circuit.admit(0.0) == 0.0
    circuit.failed(0.0)
    delay = circuit.admit(0.0)
    assert delay is not None and 0.5 <= delay <= 1.0
    assert circuit.admit(delay) == 0.0 and circuit.admit(delay) is None  # one probe
    circuit.failed(delay)
    again = circuit.admit(delay)
    assert again is not None and 1.0 <= again <= 2.0
    assert circuit.admit(delay + again) == 0.0
    circuit.untold(delay + again)  # the probe was cancelled: another may go
    assert circuit.admit(delay + again) == 0.0
    circuit.succeeded()
    assert circuit.state == "closed" and circuit.openings == 0


events = st.lists(st.one_of(st.sampled_from(["fail", "succeed", "untold", "admit"]), st.floats(0.0, 100.0)))


@given(events, st.integers(1, 3), st.integers(1, 3))
def test_the_circuit_keeps_its_rules(events, threshold, limit):
    circuit, now, row, probes = Circuit(threshold, limit), 0.0, 0, 0
    for event in events:
        broken = circuit.state == "broken"
        match event:
            case "fail":
                circuit.failed(now)
                row, probes = row + 1, 0
                assert circuit.state != "closed" or row < threshold
            case "succeed":
                circuit.succeeded()
                row, probes = 0, 0
                assert circuit.state == ("broken" if broken else "closed")
            case "untold":
                circuit.untold(now)
                probes = 0
            case "admit":
                answer = circuit.admit(now)
                if answer == 0.0 and circuit.state != "closed":
                    assert circuit.state == "probing"
                    probes += 1
                assert probes <= 1 and (answer is None or 0.0 <= answer <= 60.0)
                assert answer is None or circuit.state != "broken"
            case _:
                now += event
        assert not broken or circuit.state == "broken"
        assert circuit.openings <= limit + 1


class Outage(World):
    """Environments cannot be made before `ends`."""

    def __init__(self, ends: float) -> None:
        super().__init__()
        self.ends = ends
        self.tried: list[float] = []

    def __call__(self, key: str) -> Any:
        now = asyncio.get_running_loop().time()
        self.tried.append(now)
        self.default = {"reset": None if now >= self.ends else ConnectionError("no pods")}
        return super().__call__(key)


def test_an_outage_costs_few_tickets():
    async def scenario() -> None:
        world, buffer = Outage(100.0), FakeBuffer([f"k{n}" for n in range(100)])
        circuit = Circuit(threshold=4)
        limits = Limits(reset_retries=0)
        options: dict[str, Any] = {"concurrency": 4, "closed": (BufferClosed,)}
        await RolloutScheduler(world, FakePolicy(), buffer, circuit=circuit, limits=limits, **options).run()
        fates = [ticket.fate for ticket in buffer.tickets]
        assert 4 <= fates.count("failed") <= 16 and fates.count("finished") == 100 - fates.count("failed")
        gaps = [b - a for a, b in zip(world.tried, world.tried[1:], strict=False) if b < 100.0]
        assert max(gaps) > 10.0  # it waits longer and longer

    virtual(scenario())


def test_an_outage_without_end_is_an_error_not_a_wait():
    async def scenario() -> None:
        world, buffer = Outage(1e9), FakeBuffer([f"k{n}" for n in range(1000)])
        circuit = Circuit(threshold=4, limit=3)
        rollouts = RolloutScheduler(world, FakePolicy(), buffer, circuit=circuit, limits=Limits(reset_retries=0))
        with pytest.raises(BackendDown, match=r"3 pauses did not help; the last failure: 'k\d+' in reset: .*no pods"):
            await rollouts.run()
        assert not world.alive and all(ticket.fate for ticket in buffer.tickets)

    virtual(scenario())


def test_rewards_that_do_not_come_stop_the_rollout_before_they_burn_its_tasks():
    async def scenario() -> None:
        world, buffer = World(), FakeBuffer([f"k{n}" for n in range(100)])
        ends, tried = 100.0, []

        async def reward(trajectory: Trajectory) -> float:
            tried.append(now := asyncio.get_running_loop().time())
            if now < ends:
                raise RewardError("no answer")
            return 1.0

        options: dict[str, Any] = {"concurrency": 4, "closed": (BufferClosed,), "reward": reward}
        await RolloutScheduler(world, FakePolicy(), buffer, circuit=Circuit(threshold=4), **options).run()
        fates = [ticket.fate for ticket in buffer.tickets]
        assert 4 <= fates.count("failed") <= 16 and fates.count("finished") == 100 - fates.count("failed")

        ends, buffer = 1e9, FakeBuffer([f"k{n}" for n in range(1000)])
        rollouts = RolloutScheduler(world, FakePolicy(), buffer, circuit=Circuit(threshold=4, limit=3), **options)
        with pytest.raises(BackendDown, match=r"no reward comes, and 3 pauses did not help; .*no answer"):
            await rollouts.run()
        assert not world.alive and all(ticket.fate for ticket in buffer.tickets)

    virtual(scenario())


def test_a_probe_that_gets_through_lets_others_start_before_it_is_scored():
    async def reward(trajectory: Trajectory) -> float:
        await asyncio.sleep(500.0)
        return 1.0

    async def scenario() -> None:
        world, buffer = Outage(0.4), FakeBuffer([f"k{n}" for n in range(4)])
        limits = Limits(reset_retries=0)
        options: dict[str, Any] = {"concurrency": 2, "closed": (BufferClosed,), "reward": reward, "limits": limits}
        await RolloutScheduler(world, FakePolicy(), buffer, circuit=Circuit(threshold=1), **options).run()
        assert [ticket.fate for ticket in buffer.tickets] == ["failed", "failed", "finished", "finished"]
        assert world.tried[-1] < 20.0

    virtual(scenario())


def test_a_success_of_one_that_ran_already_ends_the_pause():
    async def scenario() -> None:
        world = World({"bad": {"reset": ConnectionError("x")}, "slow": {"turns": 5}})
        buffer, circuit = FakeBuffer(["slow", "bad", "k"]), Circuit(threshold=1, first=60.0)
        options: dict[str, Any] = {"concurrency": 2, "closed": (BufferClosed,), "limits": Limits(reset_retries=0)}
        await RolloutScheduler(world, FakePolicy(), buffer, circuit=circuit, **options).run()
        assert [ticket.fate for ticket in buffer.tickets] == ["finished", "failed", "finished"]
        assert asyncio.get_running_loop().time() == 16.0  # the slow one's five turns, then three

    virtual(scenario())


def test_broken_environments_do_not_open_the_circuit():
    async def scenario() -> None:
        world, buffer = World(reset=ValueError("x")), FakeBuffer([f"k{n}" for n in range(50)])
        circuit = Circuit(threshold=1)
        await RolloutScheduler(world, FakePolicy(), buffer, circuit=circuit, closed=(BufferClosed,)).run()
        assert circuit.state == "closed" and asyncio.get_running_loop().time() == 0.0

    virtual(scenario())


def test_a_backend_that_is_down_holds_up_only_its_own():
    async def scenario() -> None:
        down, up = Outage(200.0), World(turns=2)
        buffer = FakeBuffer([f"{'down' if n % 2 else 'up'} {n}" for n in range(60)])
        routed = Routed({"down": down, "up": up}, lambda key: key.split()[0])
        circuit = Circuit(threshold=2)
        options: dict[str, Any] = {"concurrency": 4, "limits": Limits(reset_retries=0), "closed": (BufferClosed,)}
        rollouts = RolloutScheduler(routed, FakePolicy(), buffer, circuit=circuit, **options)
        running = asyncio.create_task(rollouts.run())
        await asyncio.sleep(60.0)
        fates = {ticket.key: ticket.fate for ticket in buffer.tickets}
        assert sum(fate == "finished" for fate in fates.values()) == 30  # all that can be
        failed = sum(fate == "failed" for fate in fates.values())
        assert 2 <= failed <= 12 and rollouts.stats().parked == 30 - failed
        await running
        fates = {ticket.key: ticket.fate for ticket in buffer.tickets}
        assert all(fate == "finished" for key, fate in fates.items() if key.startswith("up"))
        assert sum(fate == "failed" for fate in fates.values()) <= 14 and rollouts.stats().parked == 0

    virtual(scenario())


def test_a_cancelled_ticket_that_waits_for_its_backend_wakes_nobody():
    async def scenario() -> None:
        down = Outage(1e9)
        buffer = FakeBuffer(["k0", "k1"], ends=False)
        routed = Routed({"": down}, lambda key: "")
        options: dict[str, Any] = {"circuit": Circuit(threshold=1), "limits": Limits(reset_retries=0)}
        rollouts = RolloutScheduler(routed, FakePolicy(), buffer, concurrency=1, closed=(BufferClosed,), **options)
        running = asyncio.create_task(rollouts.run())
        await asyncio.sleep(0.1)
        assert buffer.tickets[0].fate == "failed" and rollouts.stats().parked == 1
        buffer.tickets[1].end("stale")
        await asyncio.sleep(0.01)
        assert len(down.tried) == 1 and rollouts.stats().cancelled == {"stale": 1}
        buffer.close()
        await running

    virtual(scenario())


def test_a_route_that_leads_nowhere_is_the_tasks_fault():
    async def scenario() -> None:
        buffer = FakeBuffer(["up", "nowhere"])
        routed = Routed({"up": World()}, lambda key: key)
        await RolloutScheduler(routed, FakePolicy(), buffer, closed=(BufferClosed,)).run()
        assert [ticket.fate for ticket in buffer.tickets] == ["finished", "failed"]
        assert "routed to 'nowhere', which is none of up" in str(buffer.tickets[1].error)
        wrong = FakeBuffer(["up", "x"])
        with pytest.raises(KeyError):
            await RolloutScheduler(Routed({"up": World()}, {"up": "up"}.__getitem__), FakePolicy(), wrong).run()
        assert all(ticket.fate for ticket in wrong.tickets)

    virtual(scenario())


def test_bad_configuration():
    with pytest.raises(ValueError, match="threshold is 0"):
        Circuit(threshold=0)
