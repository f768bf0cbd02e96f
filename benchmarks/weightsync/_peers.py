"""Raw transports to a process at the other end, for comparison: a TCP socket, gloo and Mooncake's TransferEngine."""

from __future__ import annotations

import multiprocessing
import socket
from collections.abc import Callable
from typing import Any

import numpy as np

from weightsync.checksum import checksum
from weightsync.tensors import Bytes

MIB = 1 << 20
CHUNK = 64 * MIB


def _receive(connection: Any, port: int, size: int) -> None:
    buffer = np.zeros(size, np.uint8)
    peer = socket.create_connection(("127.0.0.1", port))
    connection.send(True)
    while connection.recv():
        view = buffer.data
        while len(view):
            view = view[peer.recv_into(view) :]
        connection.send(checksum([buffer]))


def _broadcast(connection: Any, port: int, size: int) -> None:
    import torch
    import torch.distributed as group

    torch.set_num_threads(1)
    buffer = torch.zeros(size, dtype=torch.uint8)
    group.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=1, world_size=2)
    connection.send(True)
    while connection.recv():
        for part in buffer.split(CHUNK):
            group.broadcast(part, 0)
        connection.send(checksum([buffer.numpy()]))
    group.destroy_process_group()


def _transfer_engine(connection: Any, port: int, size: int) -> None:
    from mooncake.engine import TransferEngine

    engine, buffer = TransferEngine(), np.zeros(size, np.uint8)
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    assert engine.register_memory(buffer.ctypes.data, size) == 0
    connection.send((f"127.0.0.1:{engine.get_rpc_port()}", buffer.ctypes.data))
    while connection.recv():
        connection.send(checksum([buffer]))


class Peer:
    """A process at the other end of a raw transport."""

    def __init__(self, target: Callable[[Any, int, int], None], size: int, port: int = 0) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=target, args=(theirs, port, size), daemon=True)
        self.process.start()

    def end(self) -> None:
        self.connection.send(None)
        self.process.join(10)


class RawTransports:
    """A TCP socket, gloo and the TransferEngine, each to a process of its own."""

    def __init__(self, size: int) -> None:
        import torch
        import torch.distributed as group
        from mooncake.engine import TransferEngine

        listener = socket.create_server(("127.0.0.1", 0))
        self.tcp = Peer(_receive, size, listener.getsockname()[1])
        self.socket = listener.accept()[0]
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        torch.set_num_threads(1)
        self.gloo = Peer(_broadcast, size, port)
        group.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=2)
        self.engine, self.engine_peer = TransferEngine(), Peer(_transfer_engine, size)
        assert self.engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
        self.remote = self.engine_peer.connection.recv()
        for peer in (self.tcp, self.gloo):
            peer.connection.recv()

    def works(self, source: Bytes) -> list[tuple[str, Peer, Callable[[], None]]]:
        """What each transport does to send `source`."""
        import torch
        import torch.distributed as group

        def broadcast() -> None:
            for part in torch.from_numpy(source).split(CHUNK):
                group.broadcast(part, 0)

        def write() -> None:
            name, address = self.remote
            for offset in range(0, source.size, CHUNK):
                local = source.ctypes.data + offset
                assert self.engine.transfer_sync_write(name, local, address + offset, CHUNK) == 0

        return [
            ("raw TCP socket", self.tcp, lambda: self.socket.sendall(source.data)),
            ("gloo broadcast", self.gloo, broadcast),
            ("TransferEngine write", self.engine_peer, write),
        ]

    def round(self, sync: Callable[[str, Callable[[], None]], None], source: Bytes) -> None:
        """Time each transport once, and compare what arrived."""
        assert self.engine.register_memory(source.ctypes.data, source.size) == 0
        for name, peer, work in self.works(source):
            # The engine writes into its peer's memory unasked; the others must be receiving.
            if peer is not self.engine_peer:
                peer.connection.send(True)
            sync(name, work)
            if peer is self.engine_peer:
                peer.connection.send(True)
            assert peer.connection.recv() == checksum([source]), "content"
        self.engine.unregister_memory(source.ctypes.data)

    def end(self) -> None:
        import torch.distributed as group

        for peer in (self.tcp, self.gloo, self.engine_peer):
            peer.end()
        group.destroy_process_group()
