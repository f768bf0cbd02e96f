"""A module whose import never ends, as one that waits for something at its top."""

import threading


class Env:
    pass


threading.Event().wait()
