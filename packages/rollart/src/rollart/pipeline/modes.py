"""Training modes: policy objects that the one controller reads. A mode decides, it never acts.

| mode | trains | trajectories cross updates | evicts the stale | each turn waits |
|---|---|---|---|---|
| `rollart` | beside rollout | yes, go on under new weights | yes, at once | no |
| `areal` | beside rollout | yes, go on under new weights | no: bounded at admission only | no |
| `one_off` | beside rollout, on the batch before | no: they end under the weights they began with | none is | no |
| `sync_plus` | while rollout stands still | no | none is | no |
| `sync` | while rollout stands still | no | none is | for the slowest episode, and rewards for the last |

Held by tests/rollart/test_rollart_controller.py.
"""

from __future__ import annotations

import msgspec


class Mode(msgspec.Struct, frozen=True, kw_only=True):
    """How generation and training share time.

    `overlap`: rollout goes on while the trainer works, and a version trained in one iteration is committed in
    the next, so the trainer is one version ahead of generation. Without it generation stands still during
    training and holds the trainer's own version whenever it runs.

    `hold`: a batch ends the trajectories that are not in it, and none is issued until the version that follows is
    served; so a batch's trajectories begin and end under one version, and alpha is 0.

    `evict`: a trajectory past the bound ends when the served version advances.

    `lockstep`: each turn waits for the slowest episode of the batch, and rewards for the last one to end.
    """

    name: str
    overlap: bool
    hold: bool
    evict: bool = True
    lockstep: bool = False


ROLLART = Mode(name="rollart", overlap=True, hold=False)
AREAL = Mode(name="areal", overlap=True, hold=False, evict=False)
ONE_OFF = Mode(name="one_off", overlap=True, hold=True)
SYNC_PLUS = Mode(name="sync_plus", overlap=False, hold=True)
SYNC = Mode(name="sync", overlap=False, hold=True, lockstep=True)
MODES = {mode.name: mode for mode in (ROLLART, AREAL, ONE_OFF, SYNC_PLUS, SYNC)}
