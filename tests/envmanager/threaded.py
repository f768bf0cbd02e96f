"""An environment whose module starts a thread, as some libraries do: it must not be imported before a fork."""

import threading
import time
from typing import Any

from tests.envmanager.misbehaving import Fine

threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()


class Threaded(Fine):
    def reset(self, seed: int | None = None) -> Any:
        observation, info = super().reset(seed)
        return observation, info | {"threads": threading.active_count()}
