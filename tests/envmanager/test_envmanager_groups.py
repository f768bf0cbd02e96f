"""The built-in group logic, driven step by step."""

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envmanager import Budgets, Closed, DataError, InfrastructureError, LocalGroups, LocalTicket, Outcome
from envmanager.values import Timings, Trajectory


def done(ticket: LocalTicket) -> Trajectory:
    timings = Timings(started=0.0, reset_s=0.0, ended=0.0)
    outcome = Outcome("terminated", 0)
    return Trajectory(
        id=ticket.id, key=ticket.key, seed=0, task="t", turns=[], reward=0.0, outcome=outcome, timings=timings
    )


def issue(groups: LocalGroups) -> list[LocalTicket]:
    tickets = []
    while (ticket := groups.next_nowait()) is not None:
        tickets.append(ticket)
    return tickets


def test_what_is_needed_is_issued_before_the_spares():
    groups = LocalGroups(["a", "b", "c"], group_size=2, spare_groups=1, spare_members=1)
    order = [(ticket.key, ticket.member) for ticket in issue(groups)]
    assert order[:4] == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    assert sorted(order[4:]) == [("a", 2), ("b", 2), ("c", 0), ("c", 1), ("c", 2)]


def test_the_first_finishers_win_and_the_rest_are_cancelled():
    groups = LocalGroups(["a", "b"], group_size=1, spare_groups=1, spare_members=1)
    tickets = {(ticket.key, ticket.member): ticket for ticket in issue(groups)}
    reasons: list[str] = []
    for ticket in tickets.values():
        ticket.on_cancel(reasons.append)
    winner = tickets["b", 1]
    assert winner.finish(done(winner), 0.0) == "accepted"
    assert groups.closed and reasons == ["surplus"] * 3
    assert [group.key for group in groups.complete() or []] == ["b"]
    assert tickets["a", 0].finish(done(winner), 0.0) == "ended"
    late: list[str] = []
    tickets["a", 0].on_cancel(late.append)
    assert late == ["surplus"]
    with pytest.raises(Closed):
        groups.next_nowait()


def test_fair_admits_in_start_order():
    groups = LocalGroups(["a"], group_size=1, spare_members=1, fair=True)
    first, second = issue(groups)
    second.finish(done(second), 0.0)
    assert not groups.closed  # the one that started first may still finish
    first.fail(DataError("x"))
    assert groups.closed and groups.groups[0].winners[0].id == second.id


def test_fair_admits_groups_in_start_order():
    groups = LocalGroups(["a", "b"], group_size=1, spare_groups=1, fair=True)
    a, b = issue(groups)
    b.finish(done(b), 0.0)
    assert not groups.closed
    a.finish(done(a), 0.0)
    assert [group.key for group in groups.complete() or []] == ["a"]


def test_failures_are_issued_again_within_the_budget_of_their_kind():
    groups = LocalGroups(["a", "b"], spare_groups=1, budgets=Budgets(data=1, infrastructure=2))
    a, b = issue(groups)
    for error in (DataError("x"), InfrastructureError("x"), InfrastructureError("y")):
        a.fail(error)
        (a,) = issue(groups)
    a.fail(DataError("again"))
    assert groups.groups[0].given_up == "2 data failures, the last: again"
    assert not groups.closed and issue(groups) == []
    b.fail(DataError("x"))
    (b,) = issue(groups)
    b.fail(DataError("x"))
    assert groups.closed and groups.complete() is None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"keys": []}, "spare_groups is 0 of 0 keys"),
        ({"keys": ["a"], "spare_groups": 1}, "spare_groups is 1 of 1 keys"),
        ({"keys": ["a"], "group_size": 0}, "group_size is 0"),
        ({"keys": ["a"], "spare_members": -1}, "spare_members is -1"),
    ],
)
def test_bad_configuration(options, said):
    with pytest.raises(ValueError, match=said):
        LocalGroups(**options)


def test_bad_budget():
    with pytest.raises(ValueError, match=r"Budgets\.timeout is -1"):
        Budgets(timeout=-1)


@given(
    keys=st.integers(1, 5),
    group_size=st.integers(1, 3),
    spare_groups=st.integers(0, 2),
    spare_members=st.integers(0, 2),
    fair=st.booleans(),
    data=st.data(),
)
def test_groups_are_whole_or_given_up(keys, group_size, spare_groups, spare_members, fair, data):
    spare_groups = min(spare_groups, keys - 1)
    names = [f"k{n}" for n in range(keys)]
    groups = LocalGroups(
        names, group_size=group_size, spare_groups=spare_groups, spare_members=spare_members, fair=fair
    )
    alive: dict[str, LocalTicket] = {}

    def forget(ticket: LocalTicket, reason: str = "") -> None:
        alive.pop(ticket.id, None)

    def refill() -> None:
        for ticket in issue(groups):
            alive[ticket.id] = ticket
            ticket.on_cancel(partial(forget, ticket))

    refill()
    while not groups.closed:
        assert alive, "nothing runs, and yet it is not over"
        ticket = alive[data.draw(st.sampled_from(sorted(alive)))]
        forget(ticket)
        match data.draw(st.sampled_from(["finish", "finish", "finish", "fail", "cancel"])):
            case "finish":
                assert ticket.finish(done(ticket), 0.0) == "accepted"
            case "fail":
                ticket.fail(DataError("x"))
            case _:
                ticket.cancel()
        if not groups.closed:
            refill()
    assert not alive
    for group in groups.groups:
        assert len(group.winners) in (0, group_size)
        assert not group.alive
    complete = groups.complete()
    if complete is None:
        assert sum(bool(group.given_up) for group in groups.groups) > spare_groups
    else:
        assert len(complete) == keys - spare_groups
