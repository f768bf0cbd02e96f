"""What happens to bindings when holders, owners, nodes, or the store go."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from resmgr import Binding, Closed, Node, Pool, Request, ResourceManager, StaleBinding, StoreUnavailable
from resmgr.embedded import EmbeddedServer

pytestmark = pytest.mark.real


class Rebinds(asyncio.Queue[tuple[Binding, Binding | None]]):
    def __call__(self, lost: Binding, new: Binding | None) -> None:
        self.put_nowait((lost, new))


async def event(rm: ResourceManager, kind: str, since: int = 0):
    async for found in rm.watch(since):
        if found.kind == kind:
            return found


async def test_a_dead_manager_loses_its_lease_and_its_amounts_return_once(place):
    dead, alive = await place.connect(ttl=0.3), await place.connect()
    await alive.register(Pool("a", hardware="H800", total=8))
    binding = await dead.bind(Request("x", prefer=["H800"], amount=8), timeout=0)
    loop, since = asyncio.get_running_loop(), 0
    await place.kill(dead)
    begun = loop.time()
    lost = await event(alive, "lost", since)
    assert (lost.binding, lost.token, lost.reason) == (binding.id, binding.token, "lease")
    assert loop.time() - begun < 2 * 0.3 + 3  # the slack is for a busy machine, not for the lease
    await alive.bind(Request("y", prefer=["H800"], amount=8), timeout=0)
    status = await alive.status()
    assert [(p.free, p.total) for p in status.pools] == [(0, 8)]
    with pytest.raises(StaleBinding):
        await alive.release(binding)


async def test_a_live_manager_keeps_its_lease(place):
    rm = await place.connect(ttl=0.2)
    await rm.register(Pool("a", hardware="H800", total=8))
    binding = await rm.bind(Request("x", prefer=["H800"]), timeout=0)
    while rm.stats().beats < 8:
        await rm.check(binding)
    assert rm.stats().lost == 0


async def test_a_manager_that_slept_binds_again_and_its_old_token_is_refused(place):
    rebinds = Rebinds()
    sleeper, other = await place.connect(ttl=0.6), await place.connect()
    await sleeper.register(Pool("a", hardware="H800", total=8))
    await sleeper.register(Pool("b", hardware="H20", total=8))
    request = Request("x", prefer=["H800"], fallback=["H20"], amount=5)
    binding = await sleeper.bind(request, timeout=0, on_rebind=rebinds)
    await place.expire(binding.owner)
    lost, new = await rebinds.get()
    assert lost == binding and new is not None
    assert (new.id, new.hardware, new.token > lost.token, new.owner != lost.owner) == (binding.id, "H800", True, True)
    assert (await event(other, "lost")).token == binding.token
    assert sleeper.bindings == {new.id: new}
    for use in (sleeper.release, sleeper.check):
        with pytest.raises(StaleBinding, match="granted again under token"):
            await use(binding)
    with pytest.raises(StaleBinding):
        await sleeper.annotate(binding, {"who": "stale"})
    await sleeper.release(new)


async def test_a_waiting_bind_survives_the_loss_of_its_session(place):
    rm, other = await place.connect(ttl=0.6), await place.connect()
    await other.register(Pool("a", hardware="H800", total=8))
    held = await other.bind(Request("y", prefer=["H800"], amount=8), timeout=0)
    task = asyncio.create_task(rm.bind(Request("x", prefer=["H800"])))
    while len((await rm.status()).waiting) != 1:
        pass
    (session,) = set((await rm.status()).leases) - {held.owner}
    await place.expire(session)
    while len((await other.status()).waiting) != 1 or rm.stats().sessions == 1:
        pass
    await other.release(held)
    assert (await task).owner != session


async def test_a_dead_holder_gives_the_binding_back_to_its_owner(place):
    rebinds = Rebinds()
    owner, holder = await place.connect(ttl=0.3), await place.connect()
    await owner.register(Pool("a", hardware="H800", total=8))
    binding = await owner.bind(Request("x", prefer=["H800"], amount=8), timeout=0, on_rebind=rebinds)
    held = await holder.hold(binding)
    assert held.holder != held.owner == binding.owner
    await place.kill(holder)
    lost, new = await rebinds.get()
    assert new is not None and lost.id == new.id and new.token > lost.token and new.holder == new.owner
    assert (await owner.status()).pools[0].free == 0


async def test_an_owner_that_slept_finds_its_binding_with_the_holder(place):
    owner, holder = await place.connect(ttl=0.3), await place.connect()
    await owner.register(Pool("a", hardware="H800", total=8))
    binding = await owner.bind(Request("x", prefer=["H800"], amount=8), timeout=0)
    held = await holder.hold(binding)
    await place.expire(binding.owner)
    while owner.bindings[binding.id].owner == binding.owner:
        await holder.check(held)
    assert owner.bindings[binding.id].token == binding.token
    assert (owner.stats().lost, owner.stats().sessions) == (0, 2)


async def test_a_dead_node_moves_its_bindings_and_no_others(place):
    rebinds = Rebinds()
    rm = await place.connect()
    await rm.register(Pool("a", hardware="H800", nodes=[Node("n0", 4), Node("n1", 4)]))
    await rm.register(Pool("b", hardware="H20", total=8))
    request = Request("x", prefer=["H800"], fallback=["H20"], amount=3)
    bindings = [await rm.bind(request, timeout=0, on_rebind=rebinds) for _ in range(2)]
    gone = next(b for b in bindings if b.nodes == ("n0",))
    await rm.register(Pool("a", hardware="H800", nodes=[Node("n1", 4)]), replace=True)
    lost, new = await rebinds.get()
    assert new is not None and (lost, new.hardware) == (gone, "H20")
    assert rebinds.empty()
    assert {b.hardware for b in rm.bindings.values()} == {"H800", "H20"}


async def test_a_node_that_shrinks_loses_its_newest_bindings_only(place):
    rebinds = Rebinds()
    rm = await place.connect()
    await rm.register(Pool("a", hardware="H800", total=8))
    old, new = [await rm.bind(Request("x", prefer=["H800"], amount=4), timeout=0, on_rebind=rebinds) for _ in "ab"]
    await rm.register(Pool("a", hardware="H800", total=4), replace=True)
    assert [b.id for b in (await rm.status()).bindings] == [old.id]
    await rm.release(old)
    lost, again = await rebinds.get()
    assert again is not None and (lost, again.id) == (new, new.id)


async def test_a_binding_that_no_class_can_hold_any_more_is_told_so(place):
    rebinds = Rebinds()
    rm = await place.connect(ttl=0.2)
    await rm.register(Pool("a", hardware="H800", total=8))
    binding = await rm.bind(Request("x", prefer=["H800"], amount=4), timeout=0, on_rebind=rebinds)
    await rm.register(Pool("a", hardware="H800", total=3), replace=True)
    assert await rebinds.get() == (binding, None)
    assert rm.bindings == {}


async def test_a_binding_that_is_being_granted_again_can_be_released(place):
    rm = await place.connect()
    await rm.register(Pool("a", hardware="H800", total=8))
    kept, lost = [await rm.bind(Request("x", prefer=["H800"], amount=4), timeout=0) for _ in range(2)]
    await rm.register(Pool("a", hardware="H800", total=4), replace=True)
    while rm.stats().rebinding != 1:
        await rm.check(kept)
    await rm.release(lost)
    assert (rm.stats().rebinding, set(rm.bindings)) == (0, {kept.id})
    await rm.release(kept)
    await rm.bind(Request("x", prefer=["H800"], amount=4), timeout=5)


async def test_a_release_that_fails_is_carried_out_when_the_store_is_back(place):
    rm = await place.connect(patience=0.2, io_timeout=1)
    await rm.register(Pool("a", hardware="H800", total=8))
    binding = await rm.bind(Request("x", prefer=["H800"], amount=4), timeout=0)
    await place.client.client_pause(2500)
    releasing = asyncio.create_task(rm.release(binding))
    with pytest.raises(StoreUnavailable):
        await releasing
    assert rm.bindings == {binding.id: binding}
    with pytest.raises(StoreUnavailable):
        await rm.release(binding)
    await place.client.client_unpause()
    await rm.bind(Request("x", prefer=["H800"], amount=8), timeout=30)
    assert binding.id not in rm.bindings


async def test_a_binding_lost_while_its_release_fails_is_gone(place):
    rm = await place.connect(patience=0.2, io_timeout=1)
    await rm.register(Pool("a", hardware="H800", total=8))
    binding = await rm.bind(Request("x", prefer=["H800"], amount=4), timeout=0)
    await place.client.client_pause(2500)
    with pytest.raises(StoreUnavailable):
        await rm.release(binding)
    await place.client.client_unpause()
    await place.expire(binding.owner)
    while rm.bindings:
        await rm.status()
    while rm.stats().sessions == 1:
        await rm.status()
    assert (await rm.status()).bindings == () and rm.bindings == {}


async def own_server(directory: Path) -> EmbeddedServer:
    server = EmbeddedServer(directory)
    await server.ensure()
    return server


async def test_a_forked_process_leaves_its_parents_manager_alone(tmp_path):
    """It connects its own, and nothing of its end reaches the parent."""
    async with await ResourceManager.connect(f"embedded:{tmp_path}", ttl=0.5) as rm:
        await rm.register(Pool("a", hardware="H800", total=8))
        binding = await rm.bind(Request("x", prefer=["H800"], amount=5), timeout=0)

        async def child() -> None:
            with pytest.raises(Closed, match="connect another one here"):
                await rm.release(binding)
            await rm.close()
            async with await ResourceManager.connect(f"embedded:{tmp_path}") as own:
                await own.release(await own.bind(Request("y", prefer=["H800"], amount=3), timeout=0))

        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                asyncio.run(child())
                code = 0
            finally:
                os._exit(code)
        _, status = await asyncio.to_thread(os.waitpid, pid, 0)
        assert status == 0
        beats = rm.stats().beats
        while rm.stats().beats < beats + 2:
            await rm.check(binding)
        assert (rm.stats().lost, rm.stats().sessions) == (0, 1)


async def test_a_killed_store_comes_back_with_every_binding(tmp_path):
    async with await ResourceManager.connect(f"embedded:{tmp_path}", ttl=0.5, io_timeout=0.5) as rm:
        await rm.register(Pool("a", hardware="H800", total=8))
        binding = await rm.bind(Request("x", prefer=["H800"], amount=5), timeout=0)
        server = rm._store.server
        assert server is not None and server.pid is not None
        os.kill(server.pid, signal.SIGKILL)
        await rm.check(binding)
        late = await rm.bind(Request("x", prefer=["H800"], amount=3), timeout=0)
        await rm.release(binding)
        assert [b.id for b in (await rm.status()).bindings] == [late.id]
        assert rm.stats().lost == 0


async def test_an_outage_longer_than_the_ttl_costs_nobody_a_lease(tmp_path):
    server = await own_server(tmp_path)
    rm, other = [await ResourceManager.connect(f"embedded:{tmp_path}", ttl=0.3, io_timeout=0.2) for _ in range(2)]
    await rm.register(Pool("a", hardware="H800", total=8))
    bindings = [await m.bind(Request("x", prefer=["H800"], amount=4), timeout=0) for m in (rm, other)]
    assert server.pid is not None
    os.kill(server.pid, signal.SIGSTOP)
    with pytest.raises(StoreUnavailable):
        await rm._store.call("position", patience=0.9)
    os.kill(server.pid, signal.SIGCONT)
    for manager, binding in zip((rm, other), bindings, strict=True):
        beats = manager.stats().beats
        while manager.stats().beats < beats + 2:
            await manager.check(binding)
        assert manager.stats().lost == 0
        await manager.close()
    await server.stop()


async def test_a_store_that_may_not_write_for_a_while_costs_nobody_a_lease(tmp_path):
    async with await ResourceManager.connect(f"embedded:{tmp_path}", ttl=0.3, patience=0.2) as rm:
        await rm.register(Pool("a", hardware="H800", total=8))
        binding = await rm.bind(Request("x", prefer=["H800"], amount=4), timeout=0)
        await rm._store._redis.config_set("maxmemory", 1)
        with pytest.raises(StoreUnavailable, match="OOM"):
            await rm.bind(Request("x", prefer=["H800"]), timeout=0)
        with pytest.raises(StoreUnavailable, match="OOM"):
            await rm._store.call("beat", "nobody", 0, "0-0", "0", patience=0.4)
        await rm._store._redis.config_set("maxmemory", 0)
        beats = rm.stats().beats
        while rm.stats().beats < beats + 2:
            await rm.check(binding)
        assert (rm.stats().lost, rm.stats().sessions) == (0, 1)


async def test_tokens_rise_even_where_the_last_writes_were_lost(place):
    rm = await place.connect()
    await rm.register(Pool("a", hardware="H800", total=8))
    request = Request("x", prefer=["H800"])
    before = await place.raw("HGET", "meta", "token")
    tokens = [binding.token for binding in await rm.bind_all([request] * 3)]
    await place.raw("HSET", "meta", "token", before)
    tokens += [binding.token for binding in await rm.bind_all([request] * 3)]
    assert tokens == sorted(set(tokens))


async def test_what_was_answered_survives_a_kill_at_any_moment(tmp_path):
    """Nothing is answered before it is in the file: a server that syncs its file would do so meanwhile."""
    async with await ResourceManager.connect(f"embedded:{tmp_path}", io_timeout=1) as rm:
        await rm.register(Pool("a", hardware="H800", total=64))
        server, request = rm._store.server, Request("x", prefer=["H800"])
        assert server is not None
        assert await rm._store._redis.config_get("appendfsync") == {"appendfsync": "no"}
        for kills in range(10):
            burst = [await rm.bind(request, timeout=0) for _ in range(1 + kills % 3)]
            os.kill(server.pid or 0, signal.SIGKILL)
            for binding in burst:
                await rm.check(binding)
            await rm.release(burst[0])
            assert {b.id for b in (await rm.status()).bindings} == set(rm.bindings)


async def test_a_script_that_holds_the_store_up_costs_nobody_a_lease(tmp_path):
    async with await ResourceManager.connect(f"embedded:{tmp_path}", ttl=0.3, patience=0.2) as rm:
        await rm.register(Pool("a", hardware="H800", total=8))
        binding = await rm.bind(Request("x", prefer=["H800"], amount=4), timeout=0)
        client = rm._store._redis
        await client.config_set("busy-reply-threshold", 20)
        holding = asyncio.ensure_future(client.eval("while true do end", 0))
        with pytest.raises(StoreUnavailable, match="BUSY"):
            while True:
                await rm.check(binding)
        with pytest.raises(StoreUnavailable, match="BUSY"):
            await ResourceManager.connect(f"unix://{tmp_path}/valkey.sock")
        await client.script_kill()
        await asyncio.wait([holding])
        assert holding.exception() is not None
        beats = rm.stats().beats
        while rm.stats().beats < beats + 2:
            await rm.check(binding)
        await rm.release(await rm.bind(Request("x", prefer=["H800"]), timeout=0))
        assert (rm.stats().lost, rm.stats().sessions) == (0, 1)


async def test_closing_when_a_new_session_has_just_begun_is_quiet(place, caplog):
    rm = await place.connect()
    await rm.register(Pool("a", hardware="H800", total=8))
    runner = rm._runner
    assert runner is not None
    rm._on_renewed()
    await rm.close()
    assert runner.cancelled() or runner.exception() is None
    assert "the lease is no longer kept" not in caplog.text


async def test_a_store_that_lost_everything_is_rebuilt_by_its_managers(place):
    rebinds = [Rebinds(), Rebinds()]
    managers = [await place.connect(ttl=0.5), await place.connect()]
    await managers[0].register(Pool("a", hardware="H800", nodes=[Node("n0", 4), Node("n1", 4)]))
    bindings = [
        await rm.bind(Request("x", prefer=["H800"], amount=4), timeout=0, on_rebind=heard)
        for rm, heard in zip(managers, rebinds, strict=True)
    ]
    await place.wipe()
    for binding, heard in zip(bindings, rebinds, strict=True):
        lost, new = await heard.get()
        assert lost == binding and new is not None
        assert new.token > max(b.token for b in bindings)
    assert sum(p.free for p in (await managers[0].status()).pools) == 0
